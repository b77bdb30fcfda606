"""One request of our own engine on its way out: who takes its updates in, and the deltas made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from inferloop.backends.assemble import Assembler, IncrementalDecoder
from inferloop.backends.protocols import Delta, GenerateRequest, StageTimes, Take
from inferloop.core.clock import Clock
from inferloop.core.errors import EngineError
from inferloop.engine.roster import TokenUpdate


class Receiver(Protocol):
    """Gets one request's updates, on the event loop. `ended`: the engine has let go of the request."""

    ended: bool

    def put(self, update: TokenUpdate) -> None: ...


class OnlyUpdate:
    """Receiver of a request that has one update; `update` is done when it has come."""

    def __init__(self) -> None:
        self.update: asyncio.Future[TokenUpdate] = asyncio.get_running_loop().create_future()
        self.ended = False

    def put(self, update: TokenUpdate) -> None:
        self.ended = True
        if not self.update.done():
            self.update.set_result(update)


class Together:
    """Requests that were asked for at once. `done` when all have ended, or with the first failure of any, which is when
    it is `failed`."""

    def __init__(self, num: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_open = num
        self.failed = False

    def end_one(self) -> None:
        self._num_open -= 1
        if not self._num_open and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        self.failed = True
        if isinstance(error, StopIteration):  # the one that a future refuses
            error = RuntimeError("what takes deltas raised StopIteration")
        if not self.done.done():
            self.done.set_exception(error)


class DeltaReceiver:
    """Receiver that hands on each delta as soon as it can be made: no task is woken for a token."""

    __slots__ = ("_answer", "_index", "_on_stop", "_problem", "_take", "_together", "ended")

    def __init__(
        self,
        index: int,
        answer: Answer,
        take: Take,
        together: Together,
        *,
        problem: Callable[[TokenUpdate], Exception | None],
        on_stop: Callable[[], None],
    ) -> None:
        """`problem` tells what is wrong with a last update, if anything. `on_stop` is called at a stop string, which
        the engine cannot see."""
        self._index, self._answer, self._take, self._together = index, answer, take, together
        self._problem, self._on_stop = problem, on_stop
        self.ended = False

    def put(self, update: TokenUpdate) -> None:
        if self.ended or self._together.failed:
            self.ended = self.ended or update.finish_reason is not None
            return
        try:
            if update.finish_reason is not None:
                self.ended = True
                if (problem := self._problem(update)) is not None:
                    raise problem
            delta = self._answer.delta(update)
            self._take(self._index, delta)
        except BaseException as error:  # what takes deltas must not end the event loop
            self._together.fail(error)
            return
        if delta.finish_reason is not None:
            if not self.ended:
                self.ended = True
                self._on_stop()
            self._together.end_one()


class Answer:
    """One request's text and stamps. Made when its prompt is tokenized; `decoder` is a fresh one."""

    def __init__(
        self, decoder: IncrementalDecoder, request: GenerateRequest, prompt_ids: tuple[int, ...], clock: Clock
    ) -> None:
        self._request, self.prompt_ids, self._now_ns = request, prompt_ids, clock.now_ns
        self._assembler = Assembler(decoder, request.sampling)
        self._t_tokenized_ns = clock.now_ns()
        self._wants_logprobs = request.sampling.num_logprobs is not None
        self._push = decoder.push
        self._is_plain = not self._wants_logprobs and not request.sampling.stop
        """Its deltas are nothing but the text of their tokens, the first and the last one aside."""
        self._t_first_ns: int | None = None
        self._t_last_ns: int | None = None
        self._detokenize_ns = 0
        self._told_prompt = False

    def delta(self, update: TokenUpdate) -> Delta:
        """Raises EngineError when the engine gave the request up."""
        finish = update.finish_reason
        if finish is None and self._is_plain and self._told_prompt:  # nearly always
            start_ns = self._now_ns()
            text = self._push(update.token_ids)
            self._t_first_ns = self._t_first_ns or update.t_ns
            self._t_last_ns = update.t_ns
            self._detokenize_ns += self._now_ns() - start_ns
            return Delta(text, update.token_ids, update.t_ns)
        if finish == "abort" or finish == "error" or finish == "shed":
            raise EngineError("the engine stopped before this request was complete")
        if update.token_ids:
            self._t_first_ns = self._t_first_ns or update.t_ns
            self._t_last_ns = update.t_ns
        start_ns = self._now_ns()
        logprobs = update.logprobs if self._wants_logprobs else None
        piece = self._assembler.push(update.token_ids, logprobs, hide_last=finish == "stop")
        text, stop = piece.text, piece.stop
        if stop is None and finish is not None:
            rest, stop = self._assembler.flush()
            text += rest
        self._detokenize_ns += self._now_ns() - start_ns
        if stop is not None:
            finish = "stop"
        is_first, self._told_prompt = not self._told_prompt, True
        return Delta(
            text=text,
            token_ids=piece.token_ids,
            t_ns=update.t_ns,
            logprobs=piece.logprobs,
            prompt_token_ids=self.prompt_ids if is_first else None,
            prompt_logprobs=update.prompt_logprobs,
            num_cached_tokens=update.num_cached_tokens,
            finish_reason=finish,
            stop_reason=stop if stop is not None else update.stop_reason,
            times=self._times(update) if is_first or finish is not None else None,
        )

    def _times(self, update: TokenUpdate) -> StageTimes:
        return StageTimes(
            t_engine_in_ns=self._request.t_engine_in_ns,
            t_tokenized_ns=self._t_tokenized_ns,
            t_scheduled_ns=update.t_scheduled_ns,
            t_first_token_ns=self._t_first_ns,
            t_last_token_ns=self._t_last_ns,
            detokenize_ns=self._detokenize_ns,
            preempted_ns=update.preempted_ns,
            num_preemptions=update.num_preemptions,
        )

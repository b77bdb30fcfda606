"""One request of our own engine on its way out: updates that wait to be read, and the deltas made of them."""

from __future__ import annotations

import asyncio
from collections import deque

from inferloop.backends.assemble import Assembler, IncrementalDecoder
from inferloop.backends.protocols import Delta, GenerateRequest, StageTimes
from inferloop.core.clock import Clock
from inferloop.core.errors import EngineError
from inferloop.engine.roster import TokenUpdate


class Inbox:
    """Updates of one request that its consumer has not taken yet. `ended`: the engine has let go of the request."""

    def __init__(self) -> None:
        self._updates: deque[TokenUpdate] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False

    def put(self, update: TokenUpdate) -> None:
        self._updates.append(update)
        self.ended = self.ended or update.finish_reason is not None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> TokenUpdate | None:
        """The oldest, if there is any."""
        return self._updates.popleft() if self._updates else None

    def arrival(self) -> asyncio.Future[None]:
        """Done when something has come, for which the one consumer may look then."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    async def get(self) -> TokenUpdate:
        while (update := self.take()) is None:
            await self.arrival()
        return update


class Answer:
    """One request's text and stamps. Made when its prompt is tokenized; `decoder` is a fresh one."""

    def __init__(
        self, decoder: IncrementalDecoder, request: GenerateRequest, prompt_ids: tuple[int, ...], clock: Clock
    ) -> None:
        self._request, self._prompt_ids, self._now_ns = request, prompt_ids, clock.now_ns
        self._assembler = Assembler(decoder, request.sampling)
        self._t_tokenized_ns = clock.now_ns()
        self._wants_logprobs = request.sampling.num_logprobs is not None
        self._t_first_ns: int | None = None
        self._t_last_ns: int | None = None
        self._detokenize_ns = 0
        self._told_prompt = False

    def delta(self, update: TokenUpdate) -> Delta:
        """Raises EngineError when the engine gave the request up."""
        finish = update.finish_reason
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
            prompt_token_ids=self._prompt_ids if is_first else None,
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

"""The endpoint behind chat and completions: check, generate, answer whole or as a stream, always leave one event."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from inferloop.backends.protocols import GenerateRequest, GeneratorInfo
from inferloop.core.errors import EngineError, InferloopError, OverloadedError, RequestError
from inferloop.core.ids import TraceContext, new_id
from inferloop.core.request import FinishReason
from inferloop.core.units import NS_PER_S
from inferloop.serve import sse
from inferloop.serve.asgi import (
    REQUEST_ID,
    ClientGoneError,
    read_body,
    send_body,
    send_error,
    send_json,
    start,
    wait_disconnect,
)
from inferloop.serve.chat import ChatEncoder
from inferloop.serve.choices import generate_all, spread
from inferloop.serve.completions import CompletionEncoder
from inferloop.serve.decode import beside_loop
from inferloop.serve.errors import NOT_FAULTS, error_object, log_bug
from inferloop.serve.finish import Attempt
from inferloop.serve.replica import Replica
from inferloop.serve.replies import Finish
from inferloop.serve.wire import Call, parse_chat, parse_completion

_TELL_TIMEOUT_S = 1.0
"""How long a failure waits for a client that does not read."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one endpoint reads requests and writes answers."""

    parse: Callable[[bytes, GeneratorInfo], Call]
    encoder: Callable[[sse.AnswerHead], sse.Encoder]
    id_prefix: str


CHAT = Dialect(parse_chat, ChatEncoder, "chatcmpl")
COMPLETIONS = Dialect(parse_completion, CompletionEncoder, "cmpl")


class GenerateEndpoint:
    """An ASGI application for one path."""

    def __init__(self, replica: Replica, dialect: Dialect) -> None:
        self._replica, self._dialect = replica, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        attempt = Attempt(
            self._replica,
            scope[REQUEST_ID],
            TraceContext.from_header(headers.get("traceparent")),
            number=_small_int(headers.get("x-inferloop-attempt")),
            traffic_class=_short(headers.get("x-inferloop-class")),
        )
        task = asyncio.current_task()
        assert task is not None
        self._replica.attempts[task] = attempt
        answer = _Answer(attempt, self._dialect, send, with_timings=headers.get("x-inferloop-timings") == "1")
        watcher: asyncio.Task[None] | None = None
        try:
            body = await read_body(receive, self._replica.config.max_body_bytes)
            watcher = asyncio.create_task(_interrupt_on_disconnect(receive, task, attempt))
            self._replica.admit()
            await answer.run(body)
        except ClientGoneError:
            attempt.abort("disconnect")
        except asyncio.CancelledError:
            if attempt.interrupted_by is None:  # the server itself is being torn down
                attempt.abort("drain")
                raise
            task.uncancel()
            await answer.interrupted()
        except NOT_FAULTS:
            raise
        except BaseException as error:
            if not isinstance(error, InferloopError):
                log_bug(attempt.request_id, error)
            await answer.failed(error)
        finally:
            del self._replica.attempts[task]
            if watcher is not None:
                watcher.cancel()


class _Answer:
    """Sends one answer; knows whether its headers are out, which decides how a failure can still be told."""

    def __init__(self, attempt: Attempt, dialect: Dialect, send: Send, *, with_timings: bool) -> None:
        self._attempt, self._dialect, self._send, self._with_timings = attempt, dialect, send, with_timings
        self._started = False

    async def run(self, body: bytes) -> None:
        attempt, replica = self._attempt, self._attempt.replica
        attempt.call = call = await beside_loop(self._dialect.parse, body, replica.info)
        codec = replica.codec
        if call.sampling.num_logprobs is not None and codec is None:
            raise RequestError("log-probabilities are not supported by this backend", param="logprobs")
        echoes = await self._echoes(call)
        head = sse.AnswerHead(
            id=new_id(self._dialect.id_prefix),
            created=attempt.t_wall_ns // NS_PER_S,
            model=replica.info.model_id,
            include_usage=call.include_usage,
            with_timings=self._with_timings,
            token_bytes=codec.token_bytes if codec is not None else _no_bytes,
            echoes=echoes,
        )
        encoder = self._dialect.encoder(head)
        request = GenerateRequest(
            attempt.request_id,
            attempt.trace,
            call.prompts[0],
            call.sampling,
            t_engine_in_ns=attempt.t_in_ns,
            cache_salt=call.cache_salt,
        )
        requests = spread(call, request)
        await (self._stream(requests, encoder) if call.stream else self._whole(requests, encoder))

    async def _echoes(self, call: Call) -> tuple[str, ...]:
        """What each choice's text begins with."""
        texts = [""] * len(call.prompts)
        if call.echo:
            codec = self._attempt.replica.codec
            for i, prompt in enumerate(call.prompts):
                if prompt.token_ids is None:
                    texts[i] = prompt.text or ""
                elif codec is None:
                    raise RequestError("echo of token ids is not supported by this backend", param="echo")
                else:
                    texts[i] = await asyncio.to_thread(codec.decode, prompt.token_ids)
        return tuple(text for text in texts for _ in range(call.num_per_prompt))

    async def _whole(self, requests: list[GenerateRequest], encoder: sse.Encoder) -> None:
        attempt = self._attempt
        finishes: dict[int, Finish] = {}
        async with contextlib.aclosing(generate_all(attempt.replica.generator, requests)) as deltas:
            async for index, delta in deltas:
                attempt.on_delta(delta, index)
                encoder.collect(index, delta)
                if delta.finish_reason is not None:
                    finishes[index] = _public_finish(delta.finish_reason)
        usage = attempt.usage
        in_order = [_public_finish(finishes.get(index)) for index in range(len(requests))]
        body = encoder.body(in_order, usage, attempt.timings(usage.completion_tokens))
        self._started = True
        attempt.finish()
        await send_json(self._send, 200, body)

    async def _stream(self, requests: list[GenerateRequest], encoder: sse.Encoder) -> None:
        """The headers go out with the first delta, so that what fails before it still gets its own status."""
        attempt, num_open, last = self._attempt, len(requests), b""
        async with contextlib.aclosing(generate_all(attempt.replica.generator, requests)) as deltas:
            async for index, delta in deltas:
                attempt.on_delta(delta, index)
                chunk = encoder.chunk(index, delta)
                if not self._started:
                    self._started = True
                    await start(self._send, 200, sse.HEADERS)
                    chunk = encoder.opening() + chunk
                if delta.finish_reason is not None:
                    finish = _public_finish(delta.finish_reason)
                    num_open -= 1
                    if num_open:
                        chunk += encoder.ended(index, finish)
                    else:
                        last = encoder.closing(index, finish, attempt.usage, attempt.timings(0))
                if chunk:
                    await send_body(self._send, chunk, more=True)
        if num_open:
            _public_finish(None)
        attempt.finish()
        await send_body(self._send, last)

    async def failed(self, error: BaseException) -> None:
        """Tell the client as well as is still possible."""
        if self._attempt.done:  # the event was written before the last bytes met a closed connection
            return
        self._attempt.fail(error, status=200 if self._started else None)
        await self._tell(error)

    async def interrupted(self) -> None:
        why = self._attempt.interrupted_by
        assert why is not None
        if self._attempt.done:
            return
        if why == "disconnect":
            self._attempt.abort(why)
            return
        self._attempt.abort(why, status=200 if self._started else 503)
        if self._started:
            await self._tell(EngineError("this replica shut down before the answer was complete"))
        else:  # nothing was sent, so another replica can take the request
            await self._tell(OverloadedError("this replica is shutting down"))

    async def _tell(self, error: BaseException) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_TELL_TIMEOUT_S):
                if self._started:
                    await send_body(self._send, sse.error_event(error_object(error)))
                else:
                    await send_error(self._send, error)


async def _interrupt_on_disconnect(receive: Receive, task: asyncio.Task[object], attempt: Attempt) -> None:
    await wait_disconnect(receive)
    attempt.interrupt(task, "disconnect")


def _public_finish(reason: FinishReason | None) -> Finish:
    if reason == "stop" or reason == "length":
        return reason
    raise EngineError("the engine ended this request before it was complete")


def _no_bytes(_: int) -> bytes:
    return b""


def _small_int(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 6 else 1


def _short(text: str | None) -> str | None:
    return text if text and text.isascii() and text.isprintable() and len(text) <= 64 else None

"""The endpoint behind chat and completions: check, generate, answer whole or as a stream, always leave one event."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from inferloop.core.errors import EngineError, InferloopError, OverloadedError, RequestError
from inferloop.core.ids import TraceContext
from inferloop.serve import sse
from inferloop.serve.answer import Dialect, Prepared, answer_whole, prepare, public_finish
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
from inferloop.serve.choices import generate_all
from inferloop.serve.errors import NOT_FAULTS, log_bug
from inferloop.serve.finish import Attempt
from inferloop.serve.replica import Replica

_TELL_TIMEOUT_S = 1.0
"""How long a failure waits for a client that does not read."""


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
        self._encoder: sse.Encoder | None = None
        self._started = False

    async def run(self, body: bytes) -> None:
        prepared = await prepare(self._attempt, self._dialect, body, with_timings=self._with_timings)
        self._encoder = prepared.encoder
        await (self._stream(prepared) if prepared.stream else self._whole(prepared))

    async def _whole(self, prepared: Prepared) -> None:
        body = await answer_whole(self._attempt, prepared)
        self._started = True
        self._attempt.finish()
        await send_json(self._send, 200, body)

    async def _stream(self, prepared: Prepared) -> None:
        """The headers go out with the first delta, so that what fails before it still gets its own status."""
        attempt, encoder, requests = self._attempt, prepared.encoder, prepared.requests
        num_open, last = len(requests), b""
        async with contextlib.aclosing(generate_all(attempt.replica.generator, requests)) as deltas:
            async for index, delta in deltas:
                attempt.on_delta(delta, index)
                opening = b"" if self._started else encoder.opening(delta)
                chunk = opening + encoder.chunk(index, delta)
                if not self._started:
                    self._started = True
                    await start(self._send, 200, sse.HEADERS)
                if delta.finish_reason is not None:
                    finish = public_finish(delta.finish_reason)
                    num_open -= 1
                    if num_open:
                        chunk += encoder.ended(index, finish)
                    else:
                        last = encoder.closing(index, finish, attempt.usage, attempt.timings(0))
                if chunk:
                    await send_body(self._send, chunk, more=True)
        if num_open:
            public_finish(None)
        attempt.finish()
        await send_body(self._send, last)

    async def failed(self, error: BaseException) -> None:
        """Tell the client as well as is still possible."""
        if self._attempt.done:  # the event was written before the last bytes met a closed connection
            return
        if isinstance(error, RequestError):
            self._dialect.in_its_words(error)
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
                    assert self._encoder is not None
                    await send_body(self._send, self._encoder.broken(error))
                else:
                    await send_error(self._send, error)


async def _interrupt_on_disconnect(receive: Receive, task: asyncio.Task[object], attempt: Attempt) -> None:
    await wait_disconnect(receive)
    attempt.interrupt(task, "disconnect")


def _small_int(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 6 else 1


def _short(text: str | None) -> str | None:
    return text if text and text.isascii() and text.isprintable() and len(text) <= 64 else None

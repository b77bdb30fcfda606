"""What every endpoint that works for long is: one attempt, cut short when the client leaves or the server stops, its
failure told as well as is still possible, and always one event."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from inferloop.core.errors import EngineError, InferloopError, RequestError
from inferloop.core.ids import TraceContext
from inferloop.serve.asgi import (
    ANSWERING,
    DROP,
    REQUEST_ID,
    SEND_PART,
    ClientGoneError,
    read_body,
    send_body,
    send_error,
    wait_disconnect,
)
from inferloop.serve.errors import NOT_FAULTS, cut_short, error_status, log_bug
from inferloop.serve.finish import Attempt
from inferloop.serve.replica import Replica

TIMEOUT_HEADER = "x-request-timeout-ms"
MAX_TIMEOUT_MS = 999_999_999
_TELL_TIMEOUT_S = 1.0
"""How long a failure waits for a client that does not read."""


class Answering(ABC):
    """Sends one answer; knows whether its headers are out, which decides how a failure can still be told."""

    def __init__(self, attempt: Attempt, send: Send) -> None:
        self.attempt, self.send = attempt, send
        self.send_part = send
        """The same for parts of a body that has begun, and for them only."""
        self.drop: Callable[[], None] | None = None
        """Closes the connection at once; None where that is nobody's to do."""
        self.started = False

    @abstractmethod
    async def run(self, body: bytes) -> None:
        """Answer the request completely and end the attempt."""

    def broken(self, error: BaseException) -> bytes:
        """The last thing sent when the answer fails after its beginning went out; for those that stream."""
        raise AssertionError("only a stream begins before it is complete")

    async def failed(self, error: BaseException) -> None:
        """Tell the client as well as is still possible."""
        if self.attempt.done:  # the event was written before the last bytes met a closed connection
            return
        self.attempt.fail(error, status=200 if self.started else None)
        await self._tell(error)

    async def interrupted(self) -> None:
        why = self.attempt.interrupted_by
        assert why is not None
        if self.attempt.done:
            return
        if why == "disconnect":
            self.attempt.abort(why)
            return
        error: InferloopError = cut_short(why)
        if why == "drain" and self.started:  # if nothing was sent, another replica can take the request
            error = EngineError("this replica shut down before the answer was complete")
        self.attempt.abort(why, status=200 if self.started else error_status(error))
        await self._tell(error)

    async def _tell(self, error: BaseException) -> None:
        try:
            async with asyncio.timeout(_TELL_TIMEOUT_S):
                if self.started:
                    await send_body(self.send, self.broken(error))
                else:
                    await send_error(self.send, error)
        except TimeoutError:
            if self.drop is not None:
                self.drop()
        except OSError:
            pass


class Endpoint(ABC):
    """An ASGI application for one path."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @abstractmethod
    def answering(self, attempt: Attempt, headers: Headers, send: Send) -> Answering:
        """What answers one request."""

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
        answer = self.answering(attempt, headers, send)
        attempt.told = scope.get(ANSWERING)
        answer.send_part, answer.drop = scope.get(SEND_PART, send), scope.get(DROP)
        watcher: asyncio.Task[None] | None = None
        timer: asyncio.TimerHandle | None = None
        try:
            timeout_s = _timeout_s(headers.get(TIMEOUT_HEADER), self._replica.config.request_timeout_s)
            if timeout_s is not None:
                timer = asyncio.get_running_loop().call_later(timeout_s, attempt.interrupt, task, "timeout")
            body = await read_body(receive, self._replica.config.max_body_bytes)
            watcher = asyncio.create_task(_interrupt_on_disconnect(receive, task, attempt))
            self._replica.admit()
            await answer.run(body)
        except ClientGoneError:
            attempt.abort("disconnect")
        except asyncio.CancelledError:
            if attempt.interrupted_by is None:  # the server itself is being torn down
                if not attempt.done:
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
            if timer is not None:
                timer.cancel()
            if watcher is not None:
                watcher.cancel()


async def _interrupt_on_disconnect(receive: Receive, task: asyncio.Task[object], attempt: Attempt) -> None:
    await wait_disconnect(receive)
    attempt.interrupt(task, "disconnect")


def _timeout_s(header: str | None, limit_s: float | None) -> float | None:
    """The shorter of what the caller and the server allow. Raises RequestError naming the header."""
    if header is None:
        return limit_s
    known = header.isascii() and header.isdecimal() and len(header) <= len(str(MAX_TIMEOUT_MS))
    if not (known and 1 <= int(header) <= MAX_TIMEOUT_MS):
        message = f"{TIMEOUT_HEADER} must be a number of milliseconds from 1 to {MAX_TIMEOUT_MS}"
        raise RequestError(message, param=TIMEOUT_HEADER)
    asked_s = int(header) / 1000
    return asked_s if limit_s is None else min(asked_s, limit_s)


def _small_int(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 6 else 1


def _short(text: str | None) -> str | None:
    return text if text and text.isascii() and text.isprintable() and len(text) <= 64 else None

"""The server's HTTP protocol: uvicorn's, with a bound on what comes before a body, answers in order, and bodies for
HTTP/1.0. What it relies on inside of uvicorn is in tests/unit/serve/test_http.py, which fails where that changes."""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from inferloop.core.errors import RequestError
from inferloop.serve.asgi import DROP
from inferloop.serve.errors import HeadTooLargeError, error_object

MAX_HEAD_BYTES = 65536
"""Of a request's line and headers together, as many as most servers take at most."""
MAX_WAITING = 16
"""Requests of a connection that may wait behind the one that is answered, before no more is read (uvicorn stops at
the first). Until then, or until one waits with a body beyond uvicorn's 64 KiB, the connection's end is seen at once."""


class HttpProtocol(HttpToolsProtocol):
    """Answers a longer head with 431 as soon as it is too long, and closes the connection; behind the answers to the
    requests that came before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head, self._num_received, self._num_parsed = True, 0, 0
        self._head_ended = False
        self._problem = RequestError("This is not a valid HTTP request", code="invalid_http")
        self._cycles: list[RequestResponseCycle] = []
        """Of the requests that are not answered completely, in their order; the first is being answered."""
        self._refusal: bytes | None = None
        """The last thing to be written. What comes after it was decided is not looked at."""
        self._inner, self.app = self.app, self._answer

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        in_head, self._head_ended = self._in_head, False
        super().data_received(data)
        # Where a head ended, its body or more requests took an unknown part of `data`.
        if in_head and self._in_head and not self._head_ended and self._refusal is None:
            self._num_received += len(data)  # of one header that does not end nothing is parsed
            if self._num_received > MAX_HEAD_BYTES:
                self._problem = HeadTooLargeError(MAX_HEAD_BYTES)
                self.send_400_response("")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn tells the last of them only
            _disconnect(cycle)

    def on_message_begin(self) -> None:
        self._in_head, self._num_received, self._num_parsed = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_ended = False, True
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        if 0 < len(self.pipeline) < MAX_WAITING:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        del self._cycles[0]
        super().on_response_complete()
        self._refuse_in_turn()

    def send_400_response(self, msg: str) -> None:
        """Called for what the parser refuses; `msg`, which says no more than that, is not used."""
        body = error_object(self._problem)
        head = [
            STATUS_LINE[self._problem.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            b"content-length: %d\r\n\r\n" % len(body),
        ]
        self._refusal = b"".join([*head, body])
        if self._cycles and not self._in_head and self._cycles[-1].more_body:  # it is that one's body
            broken = self._cycles.pop()
            _disconnect(broken)
            if self._cycles:
                self.pipeline.popleft()  # it waits for its turn there
            elif broken.response_started:
                self.transport.close()
        self._refuse_in_turn()

    def _refuse_in_turn(self) -> None:
        if self._refusal is not None and not self._cycles and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.close()

    def _count(self, num: int) -> None:
        self._num_parsed += num
        if self._num_parsed > MAX_HEAD_BYTES:
            self._problem = HeadTooLargeError(MAX_HEAD_BYTES)
            raise self._problem  # ends the parser, which makes uvicorn call send_400_response

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, and a way out for it when a client does not read."""
        cycle = next(c for c in self._cycles if c.scope is scope)

        def drop() -> None:
            _disconnect(cycle)
            self.transport.abort()

        scope[DROP] = drop
        await self._inner(scope, receive, _until_closed(cycle, send) if scope["http_version"] == "1.0" else send)


def _disconnect(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


def _until_closed(cycle: RequestResponseCycle, send: Send) -> Send:
    """For HTTP/1.0, which knows no chunks: a body without a length ends with the connection."""

    has_length = False

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message["body"])
        await send(message)

    return send_plain

"""The server's HTTP protocol: uvicorn's, with a bound on what comes before a body."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from inferloop.core.errors import RequestError
from inferloop.serve.errors import HeadTooLargeError, error_object

MAX_HEAD_BYTES = 65536
"""Of a request's line and headers together, as many as most servers take at most."""


class HttpProtocol(HttpToolsProtocol):
    """Answers a longer head with 431 as soon as it is too long, and closes the connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head, self._num_received, self._num_parsed = True, 0, 0
        self._head_ended = False
        self._problem = RequestError("This is not a valid HTTP request", code="invalid_http")

    def data_received(self, data: bytes) -> None:
        in_head, self._head_ended = self._in_head, False
        super().data_received(data)
        # Where a head ended, its body or more requests took an unknown part of `data`.
        if in_head and self._in_head and not self._head_ended and not self.transport.is_closing():
            self._num_received += len(data)  # of one header that does not end nothing is parsed
            if self._num_received > MAX_HEAD_BYTES:
                self._problem = HeadTooLargeError(MAX_HEAD_BYTES)
                self.send_400_response("")

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

    def send_400_response(self, msg: str) -> None:
        """Called for what the parser refuses; `msg`, which says no more than that, is not used."""
        body = error_object(self._problem)
        head = [
            STATUS_LINE[self._problem.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            b"content-length: %d\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join([*head, body]))
        self.transport.close()

    def _count(self, num: int) -> None:
        self._num_parsed += num
        if self._num_parsed > MAX_HEAD_BYTES:
            self._problem = HeadTooLargeError(MAX_HEAD_BYTES)
            raise self._problem  # ends the parser, which makes uvicorn call send_400_response

"""One connection: a request out, an answer in, each read stamped before anything looks into it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from typing import Any, Protocol, cast

import httptools

_NUM_ACKED_AT = 120
"""Of `struct tcp_info` on Linux: tcpi_bytes_acked."""
_U64 = struct.Struct("=Q")
CUT_SHORT = "the server closed the connection before the answer was complete"


class Receiver(Protocol):
    """Who waits for an answer. Called in this order, from the connection's callbacks; must not raise."""

    def head(self, t_ns: int, status: int, headers: dict[bytes, bytes]) -> None:
        """`headers` are by lower-case name; of a repeated one the last."""
        ...

    def body(self, t_ns: int, data: bytes) -> None: ...

    def end(self, t_ns: int, problem: str | None, detail: str) -> None:
        """`problem`: None when the answer is complete; truncated, protocol; stale: an idle connection, which the server
        had closed before it got the request; or lost: an idle one, and whether before or after is not known. `t_ns` is
        when the last bytes came, 0 without any."""
        ...


class Owner(Protocol):
    """Who keeps connections."""

    num_bytes_received: int

    def free(self, connection: Connection) -> None: ...
    def gone(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """Not pipelined: `send` only when free. It gives itself back to its owner before the receiver hears of the end."""

    __slots__ = (
        *("_owner", "_transport", "_fd", "_parser", "_receiver", "_now_ns", "_pieces", "_headers"),
        *("_status", "complete", "_stray", "_keep", "_t_last_ns", "closed", "was_idle", "on_body"),
        *("_num_sent", "_num_before", "_refused", "_ended"),
    )

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._fd = -1
        self._receiver: Receiver | None = None
        self._now_ns = time.monotonic_ns
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # of httptools: as cheap as a callback can be
        self._headers: dict[bytes, bytes] = {}
        self._status = self._t_last_ns = 0
        self.complete = self._stray = self._keep = False
        """Whether the whole answer has been read; it is told of before the receiver hears of its last bytes."""
        self._num_sent = self._num_before = 0
        self._refused = self._ended = False
        self.closed = False
        self.was_idle = False
        """Whether it had been lying idle when it was taken."""
        self._parser: Any = httptools.HttpResponseParser(self)

    def send(self, receiver: Receiver, payload: bytes) -> None:
        """All of `payload` at once: what the socket does not take now follows as it can."""
        self._receiver = receiver
        self._status = self._t_last_ns = 0
        self.complete = self._stray = False
        self._headers = {}
        self._num_before = self._num_sent
        self._num_sent += len(payload)
        sent = 0
        if self._fd >= 0 and not self._transport.is_closing():
            # Past the loop's buffers, which are written only when all that is ready has been handled: the stamp of the
            # send is then true also of the last of many.
            try:
                sent = os.write(self._fd, payload)
            except BlockingIOError:
                pass
            except OSError:
                self._refused = True
                self.abort()
                return
        if sent < len(payload):
            self._transport.write(payload[sent:])

    def abort(self) -> None:
        """Close without a word; whoever waits hears of it from the loop, unless `forget` was called."""
        self.closed = True
        self._transport.abort()

    def forget(self) -> None:
        """The receiver has given up; the connection cannot be used again."""
        self._receiver = None
        self.abort()

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from asyncio's
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if transport.get_extra_info("ssl_object") is None:
                self._fd = sock.fileno()

    def data_received(self, data: bytes) -> None:
        t_ns = self._now_ns()
        receiver = self._receiver
        self._owner.num_bytes_received += len(data)
        if receiver is None:
            self.abort()  # bytes that nobody asked for: out of step
            return
        self._t_last_ns = t_ns
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                if self._pieces:  # what came before it, in whatever read
                    receiver.body(t_ns, b"".join(self._pieces))
                    self._pieces.clear()
                self._end("protocol", f"not HTTP/1.1: {error}")
                self.abort()
                return
            self._keep = False  # the answer is whole, what came after it is none
        pieces = self._pieces
        if pieces:
            receiver.body(t_ns, pieces[0] if len(pieces) == 1 else b"".join(pieces))
            pieces.clear()
        if self.complete:
            if self._keep and not self._stray and not self._transport.get_write_buffer_size():
                self._receiver = None
                self._owner.free(self)
                receiver.end(t_ns, None, "")
            else:
                self._end(None, "")
                self.abort()

    def eof_received(self) -> None:
        self.closed = self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._receiver is not None:
            if not self._t_last_ns:
                self._end(self._before_any_byte(), CUT_SHORT)
            elif exc is None and self._status and not self._is_framed():
                self._end(None, "")  # a body that ends with the connection
            else:
                self._end("truncated", CUT_SHORT)
        self._fd = -1
        self._owner.gone(self)

    def _before_any_byte(self) -> str:
        """What it means that nothing came. A server that ends a connection in order has either read the request, which
        its kernel then acknowledged, or ended before it came. A reset may mean either."""
        if not self.was_idle:
            return "truncated"
        if self._refused:
            return "stale"
        num_acked = _num_acked(self._fd) if self._ended else None
        if num_acked is None:
            return "lost"
        return "truncated" if num_acked > self._num_before else "stale"

    def _end(self, problem: str | None, detail: str) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.end(self._t_last_ns, problem, detail)

    def _is_framed(self) -> bool:
        return b"content-length" in self._headers or b"chunked" in self._headers.get(b"transfer-encoding", b"").lower()

    # httptools
    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self.complete:
            self._stray = True  # a second answer to one request: not ours to read
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # interim (100 Continue, 103 Early Hints): the answer is still to come
            self._headers = {}
            return
        self._status = status
        self._keep = self._parser.should_keep_alive()
        if self._receiver is not None:
            self._receiver.head(self._t_last_ns, status, self._headers)

    def on_message_complete(self) -> None:
        if self._status:
            self.complete = True


def _num_acked(fd: int) -> int | None:
    """Bytes of what was sent that the other side's kernel has acknowledged (tcp(7), TCP_INFO). None where it cannot be
    told: over TLS, whose bytes are others than ours, and on other systems."""
    try:
        sock = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    with sock, contextlib.suppress(OSError, AttributeError, struct.error):
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _NUM_ACKED_AT + _U64.size)
        return int(_U64.unpack_from(told, _NUM_ACKED_AT)[0]) - 1  # the handshake counts for one
    return None

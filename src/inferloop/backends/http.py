"""A small HTTP/1.1 client for one origin: raw asyncio protocol + httptools, arrival stamped before parsing.

General clients cap near a thousand requests per second and hide when bytes arrived; load generation, the gateway and
probes need both. Connections are kept alive and reused; a response that is not read to its end closes its connection.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import httptools

from inferloop.backends.endpoint import Endpoint, endpoint_of
from inferloop.backends.limit import within

Header = tuple[str, str]
_HIGH_WATER_BYTES = 1 << 20
_CUT_SHORT = "the server closed the connection before the answer was complete"
_RETRY_ON_STALE = 1  # a kept-alive connection may have been closed by the server just as we reused it


class HttpError(Exception):
    """A request that got no complete answer. kind: connect | timeout | truncated | protocol. `status` is that of an
    answer which was not the wanted one; `is_distrust` says that the server's certificate was not accepted."""

    def __init__(self, kind: str, message: str, *, status: int | None = None, is_distrust: bool = False) -> None:
        self.kind, self.status, self.is_distrust = kind, status, is_distrust
        super().__init__(message)


class _Connection(asyncio.Protocol):
    """One socket, one response at a time. Feeds stamped body pieces to the response that owns it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.received_any = False
        self.reusable = False
        self._parser: Any = None
        self._now_ns = 0
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._buffered_bytes = 0
        self._paused = False
        self._done = False
        self._stray = False
        self._error: HttpError | None = None
        self._wake = asyncio.Event()
        self.status = 0
        self.headers: list[Header] = []
        self.t_headers_ns = 0

    def begin(self) -> None:
        """Forget the previous response."""
        self._parser = httptools.HttpResponseParser(self)
        self._pieces.clear()
        self._buffered_bytes = 0
        self._done, self._stray, self._error, self.received_any = False, False, None, False
        self.status, self.headers, self.t_headers_ns = 0, [], 0
        self._wake.clear()
        if self.closed:  # lost between connecting and now: no more callbacks will come to say so
            self._fail(HttpError("truncated", _CUT_SHORT))

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from asyncio's
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._now_ns = time.monotonic_ns()
        self.received_any = True
        if self._parser is None or self._done:
            self.abort()  # bytes nobody asked for: the connection is out of step
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(HttpError("protocol", f"not HTTP/1.1: {error}"))
            self.abort()
        self._wake.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self._done:
            if exc is None and self._parser is not None and self.t_headers_ns and not self._framed():
                self._done = True  # a body delimited by the orderly end of the connection
            else:
                self._fail(HttpError("truncated", _CUT_SHORT))
        self._wake.set()

    # httptools callbacks
    def on_message_begin(self) -> None:
        self._stray = self._done  # a second answer to one request: not ours to read

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._stray:
            self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if self._stray:
            self.reusable = False
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # interim (100 Continue, 103 Early Hints): the answer is still to come
            self.headers = []
            return
        self.status = status
        self.t_headers_ns = self._now_ns
        self.reusable = bool(self._parser.should_keep_alive())

    def on_body(self, body: bytes) -> None:
        if self._stray:
            return
        self._pieces.append((self._now_ns, body))
        self._buffered_bytes += len(body)
        if self._buffered_bytes > _HIGH_WATER_BYTES and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.t_headers_ns:
            self._done = True

    def _framed(self) -> bool:
        return any(
            name == "content-length" or (name == "transfer-encoding" and "chunked" in v) for name, v in self.headers
        )

    def _fail(self, error: HttpError) -> None:
        if self._error is None:
            self._error = error

    # the owning response
    async def wait_headers(self) -> None:
        while not self.t_headers_ns:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()

    async def next_piece(self) -> tuple[int, bytes] | None:
        """(arrival ns, bytes), or None at the end. Raises HttpError when the answer was cut short."""
        while not self._pieces:
            if self._done:
                return None
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        piece = self._pieces.popleft()
        self._taken(len(piece[1]))
        return piece

    async def next_bytes(self) -> bytes | None:
        """Everything that has arrived and was not read yet, as one; None at the end. Raises like `next_piece`."""
        piece = await self.next_piece()
        if piece is None or not self._pieces:
            return None if piece is None else piece[1]
        rest = [data for _, data in self._pieces]
        self._pieces.clear()
        self._taken(self._buffered_bytes)
        return b"".join([piece[1], *rest])

    def _taken(self, num_bytes: int) -> None:
        self._buffered_bytes -= num_bytes
        if self._paused and self._buffered_bytes <= _HIGH_WATER_BYTES // 2:
            self._paused = False
            if self.transport is not None and not self.closed:
                self.transport.resume_reading()

    @property
    def complete(self) -> bool:
        return self._done and not self._pieces

    def abort(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()


class Response:
    """An answer whose headers have arrived. Read it to the end, or `abort` it."""

    def __init__(self, connection: _Connection, client: HttpClient) -> None:
        self._connection, self._client = connection, client
        self.status = connection.status
        self.headers = connection.headers
        self.t_headers_ns = connection.t_headers_ns
        self._released = False

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    async def pieces(self) -> AsyncIterator[tuple[int, bytes]]:
        """Body bytes as they arrive, each with its arrival in monotonic ns. Leaving early closes the connection."""
        try:
            while (piece := await self._connection.next_piece()) is not None:
                yield piece
        finally:
            self.release()

    async def next_bytes(self) -> bytes | None:
        """For relays: all that has arrived since the last call, None at the end. Raises HttpError (truncated). The
        caller releases."""
        return await self._connection.next_bytes()

    async def read(self) -> bytes:
        return b"".join([data async for _, data in self.pieces()])

    async def json(self) -> Any:
        return json.loads(await self.read())

    def release(self) -> None:
        """Give the connection back, or close it when the answer was not read to its end. Idempotent."""
        if not self._released:
            self._released = True
            self._client._give_back(self._connection)

    abort = release


class HttpClient:
    """Requests to one origin (`http://host:port`, https too). Not thread-safe; lives on one event loop."""

    def __init__(
        self,
        target: Endpoint | str,
        *,
        headers: Iterable[Header] = (),
        connect_timeout_s: float = 5.0,
        max_idle: int = 1024,
    ) -> None:
        """Raises UsageError for what is no URL, or an endpoint whose authority cannot be read."""
        self.endpoint = endpoint = endpoint_of(target)
        self.base_url = endpoint.bare + endpoint.base_path
        self._host, self._port, self._path = endpoint.host, endpoint.port, endpoint.base_path
        self._tls = endpoint.tls()
        self._connect_timeout_s, self._max_idle = connect_timeout_s, max_idle
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        fixed = [("host", endpoint.authority), *endpoint.headers, *headers]
        self._fixed = "".join(f"{name}: {value}\r\n" for name, value in fixed)

    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Iterable[Header] = (),
        body: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Response:
        """Send, and return when the response's headers have arrived. `timeout_s` bounds connect + headers.

        Raises HttpError. A reused connection that turns out to be dead before any byte came back is replaced once.
        """
        head = [f"{method} {self._path}{path} HTTP/1.1\r\n", self._fixed]
        head += [f"{name}: {value}\r\n" for name, value in headers]
        if body is not None:
            head.append(f"content-length: {len(body)}\r\n")
        payload = "".join([*head, "\r\n"]).encode("latin-1") + (body or b"")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(payload)
        except TimeoutError:
            raise HttpError("timeout", f"{method} {self.base_url}{path}: no answer within {timeout_s:g} s") from None

    async def _exchange(self, payload: bytes) -> Response:
        for attempt in range(_RETRY_ON_STALE + 1):
            reused = self._take_idle() if attempt == 0 else None
            connection = reused or await self._connect()
            connection.begin()
            assert connection.transport is not None
            connection.transport.write(payload)
            try:
                await connection.wait_headers()
                return Response(connection, self)
            except HttpError as error:
                self._drop(connection)
                stale = reused is not None and error.kind == "truncated" and not connection.received_any
                if not stale:
                    raise
            except BaseException:
                self._drop(connection)
                raise
        raise AssertionError("unreachable")

    async def get_json(self, path: str, *, timeout_s: float = 5.0) -> Any:
        """GET and parse. Raises HttpError, also (kind protocol) for a status other than 200 and for what is no JSON."""
        response = await self.request("GET", path, timeout_s=timeout_s)
        body = await response.read()
        if response.status != 200:
            text = f"GET {self.base_url}{path}: HTTP {response.status}: {self._excerpt(body)}"
            raise HttpError("protocol", text, status=response.status)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise HttpError("protocol", f"GET {self.base_url}{path}: not JSON: {self._excerpt(body)}") from None

    async def close(self) -> None:
        for connection in list(self._open):
            self._drop(connection)
        self._idle.clear()
        await asyncio.sleep(0)  # let the transports run their connection_lost

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with within(self._connect_timeout_s):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise HttpError("connect", f"{self.base_url}: no connection in {self._connect_timeout_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            text = f"{self.base_url}: its certificate is not trusted: {error.verify_message}"
            raise HttpError("connect", text, is_distrust=True) from error
        except OSError as error:
            raise HttpError("connect", f"{self.base_url}: {error}") from error
        self._open.add(connection)
        return connection

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
            self._open.discard(connection)
        return None

    def _give_back(self, connection: _Connection) -> None:
        healthy = connection.complete and connection.reusable and not connection.closed
        if healthy and len(self._idle) < self._max_idle:
            self._idle.append(connection)
        else:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._open.discard(connection)
        connection.abort()

    def _excerpt(self, body: bytes) -> str:
        """The beginning of a body, on one line, for a message."""
        text = " ".join(self.endpoint.redact(body.decode(errors="replace"))[:200].split())
        return text or "(empty)"

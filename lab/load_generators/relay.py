"""A relay of bytes that notes when each piece passed, and what became of each request."""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import Any, cast

import httptools

from inferloop.bench.stream import StreamReader
from inferloop.measure.timing import RequestTiming

_HERE = "127.0.0.1"


class Recorded:
    """The answers of streamed POSTs that passed, in the order of their requests."""

    def __init__(self) -> None:
        self.timings: list[RequestTiming] = []
        self.idle = asyncio.Event()
        """Set while no connection is open on either side."""
        self._num_open = 0

    def count(self, change: int) -> None:
        self._num_open += change
        self.idle.clear() if self._num_open else self.idle.set()

    def in_order(self) -> list[RequestTiming]:
        return sorted(self.timings, key=lambda r: r.t_send_ns)


class _ToServer(asyncio.Protocol):
    """The half that speaks with the server: answers are passed on at once, and looked into afterwards."""

    def __init__(self, client: _ToClient) -> None:
        self._client = client
        self._parser: Any = httptools.HttpResponseParser(self)
        self._reader = StreamReader()
        self._t_ns = self._t_headers_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._client.recorded.count(+1)

    def data_received(self, data: bytes) -> None:
        self._t_ns = monotonic_ns()
        self._client.transport.write(data)
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.transport.close()
        self._client.recorded.count(-1)

    # httptools
    def on_headers_complete(self) -> None:
        self._t_headers_ns = self._t_ns
        self._reader = StreamReader()

    def on_body(self, body: bytes) -> None:
        self._reader.feed(self._t_ns, body)

    def on_message_complete(self) -> None:
        self.end()

    def end(self) -> None:
        """Of the answer in progress, if there is one."""
        if self._t_headers_ns:
            self._client.answered(self._t_headers_ns, self._t_ns, self._reader)
        self._t_headers_ns = 0


class _ToClient(asyncio.Protocol):
    """The half that the client sees."""

    def __init__(self, port: int, recorded: Recorded) -> None:
        self._port, self.recorded = port, recorded
        self._parser: Any = httptools.HttpRequestParser(self)
        self._server: _ToServer | None = None
        self._early = b""
        self._t_ns: int | None = None
        """When the first byte of the request in progress came."""
        self._method = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.recorded.count(+1)
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, self._server = await loop.create_connection(lambda: _ToServer(self), _HERE, self._port)
        self._server.transport.write(self._early)

    def data_received(self, data: bytes) -> None:
        if self._t_ns is None:
            self._t_ns = monotonic_ns()
        if self._server is None:
            self._early += data
        else:
            self._server.transport.write(data)
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._server is not None:
            self._server.end()  # some hang up at [DONE], before the body's own end
            self._server.transport.close()
        self.recorded.count(-1)

    # httptools
    def on_headers_complete(self) -> None:
        self._method = self._parser.get_method()

    def answered(self, t_headers_ns: int, t_end_ns: int, reader: StreamReader) -> None:
        t_send_ns, self._t_ns = self._t_ns, None
        if self._method != b"POST" or t_send_ns is None:
            return
        found = reader.finish()
        self.recorded.timings.append(
            RequestTiming(
                f"request-{len(self.recorded.timings)}",
                None,
                t_send_ns,
                t_headers_ns,
                t_end_ns,
                found.chunks,
                found.num_input_tokens or 0,
                found.num_output_tokens,
                error=found.error,
                finish_reason=found.finish_reason,
                t_first_answer_ns=found.t_first_answer_ns,
                empty_frames_ns=found.empty_frames_ns,
            )
        )


async def start(port: int, recorded: Recorded) -> asyncio.Server:
    """Listens on a free port of this machine and passes all on to `port` of it."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _ToClient(port, recorded), _HERE, 0)

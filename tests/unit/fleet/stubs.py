"""A replica made of one function: reads a request, then writes whatever bytes the test wants, however wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Asked:
    """One request as the stub got it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Talk:
    """The stub's side of one exchange."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, status: int, body: bytes, *extra: str) -> None:
        head = "".join(f"{line}\r\n" for line in (f"content-length: {len(body)}", *extra))
        await self.raw(f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{head}\r\n".encode() + body)

    async def sse(self, *events: str) -> None:
        """Begin an event stream."""
        await self.raw(SSE_HEAD)
        for event in events:
            await self.event(event)

    async def event(self, text: str) -> None:
        await self.chunk(f"data: {text}\n\n".encode())

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def cut(self) -> None:
        self.writer.transport.abort()

    async def until_closed(self) -> None:
        """Wait until the other side has closed or reset."""
        try:
            while await self.reader.read(1024):
                pass
        except ConnectionError:
            pass


Handler = Callable[[Asked, Talk], Awaitable[None]]


@dataclass
class Stub:
    """A listening stub. `handle` may be replaced at any time."""

    handle: Handler
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    num_active: int = 0
    url: str = ""
    _server: asyncio.Server | None = None

    async def open(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        talk = Talk(reader, writer)
        try:
            while asked := await _read_request(reader):
                self.asked.append(asked)
                self.num_active += 1
                try:
                    await self.handle(asked, talk)
                finally:
                    self.num_active -= 1
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()


async def _read_request(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    line, *rest = head.rstrip("\r\n").split("\r\n")
    method, target, _ = line.split(" ")
    headers = {name.lower(): value for name, _, value in (h.partition(": ") for h in rest)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, target, headers, body)


MakeStub = Callable[[Handler], Awaitable[Stub]]


def answers(status: int, body: bytes = b'{"error": {}}', *extra: str) -> Handler:
    """`extra`: header lines."""

    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.json(status, body, *extra)

    return handle


ok = answers(200, b'{"ok": true}')


async def dies(asked: Asked, talk: Talk) -> None:
    talk.cut()


async def never(asked: Asked, talk: Talk) -> None:
    await talk.until_closed()

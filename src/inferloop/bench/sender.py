"""A process that does nothing but send: python -m inferloop.bench.sender FD, the descriptor being its only link."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any, cast

import uvloop

from inferloop.backends.endpoint import Endpoint
from inferloop.bench.client.priority import go_first
from inferloop.bench.engine import Engine
from inferloop.bench.exchange import Outcome
from inferloop.bench.messages import (
    Ended,
    Frames,
    Halt,
    Job,
    Ready,
    Refused,
    Report,
    Start,
    add_outcome,
    decode_to_sender,
    framed,
)
from inferloop.bench.share import Part, Share
from inferloop.bench.window import Stop
from inferloop.core.errors import UsageError
from inferloop.core.secret import Secret

_FLUSH_TICKS = 4
_FLUSH_BYTES = 1 << 16


class _Link(asyncio.Protocol):
    """The way to the calling process. When that is gone, so is this."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.job: asyncio.Future[Job] = loop.create_future()
        """Done when all of its requests have come, in `share`."""
        self.share = Share()
        self.start_ns: asyncio.Future[int] = loop.create_future()
        self.engine: Engine | None = None
        self.halted: Stop | None = None
        self._job: Job | None = None
        self._frames = Frames()
        self._outbox = bytearray()
        self._num_ticks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            match decode_to_sender(message):
                case Job() as job:
                    self._job = job
                    self._check_whole()
                case Part() as part:
                    self.share.append(part)
                    self._check_whole()
                case Start(start_ns):
                    self.start_ns.set_result(start_ns)
                case Halt(how):
                    self.halted = how
                    if self.engine is not None:
                        self.engine.stop(how)

    def connection_lost(self, exc: Exception | None) -> None:
        os._exit(1)  # nobody is left who could want an answer

    def tell(self, outcome: Outcome) -> None:
        """Encoded at once and sent later, so that neither is ever much work."""
        add_outcome(self._outbox, outcome)
        if len(self._outbox) >= _FLUSH_BYTES:
            self.flush()

    def tick(self) -> None:
        self._num_ticks += 1
        if self._outbox and self._num_ticks % _FLUSH_TICKS == 0:
            self.flush()

    def flush(self) -> None:
        self._transport.write(framed(Ended(bytes(self._outbox))))
        self._outbox.clear()

    def say(self, message: Ready | Refused | Report) -> None:
        if self._outbox:
            self.flush()
        self._transport.write(framed(message))

    def _check_whole(self) -> None:
        if self._job is not None and len(self.share) == self._job.num_requests:
            self.job.set_result(self._job)


def _give_up(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A fault of our own in a callback: a window that went on without it would lie."""
    loop.default_exception_handler(context)
    logging.shutdown()
    os._exit(70)


async def _send(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_give_up)
    _, link = await loop.create_unix_connection(_Link, sock=sock)
    job = await link.job
    if job.core is not None:
        os.sched_setaffinity(0, {job.core})
    try:
        ca_file = None if job.ca_file is None else Path(job.ca_file)
        api_key = None if job.api_key is None else Secret(job.api_key)
        endpoint = Endpoint(job.url, api_key, ca_file, job.insecure)
        base = int.from_bytes(job.id_base, "big")
        engine = Engine(link.share, endpoint, job.options, base, deliver=link.tell, tick=link.tick)
    except UsageError as error:
        link.say(Refused(str(error)))
        await loop.create_future()
        return
    await engine.prepare()
    link.say(Ready())
    start_ns = await link.start_ns
    link.engine = engine
    if link.halted is not None:  # before there was one to tell
        engine.stop(link.halted)
    link.say(Report(await engine.run(start_ns)))
    await loop.create_future()  # until the other side has read it all and hangs up


def main() -> None:
    with contextlib.suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    go_first()
    uvloop.run(_send(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()

"""The sender processes as the calling process sees them: started, told when to begin, listened to, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable

from inferloop.bench.engine import EngineReport
from inferloop.bench.messages import Ended, Frames, Halt, Job, Ready, Refused, Report, Start, decode_from_sender, framed
from inferloop.bench.share import Part
from inferloop.bench.window import Stop
from inferloop.core.errors import UsageError

_END_S = 5.0


class SenderDiedError(Exception):
    """A sender ended without having told all."""


class Sender(asyncio.Protocol):
    """One process. `on_ended` is called on the event loop with what messages.outcomes_in reads, in the order in which
    requests ended."""

    def __init__(self, on_ended: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self._on_ended = on_ended
        self._frames = Frames()
        self._writable = asyncio.Event()
        self.begun = False
        self.ready: asyncio.Future[None] = loop.create_future()
        self.report: asyncio.Future[EngineReport] = loop.create_future()
        """Raises SenderDiedError, as `ready` does; UsageError for a job that it cannot use."""

    async def start(self) -> None:
        """Launch it. Raises OSError when it cannot be started."""
        ours, self._process = _launch()
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        self._transport = transport
        self._writable.set()

    async def hand(self, job: Job, parts: Iterable[Part]) -> None:
        """Its job and its share, no faster than it reads; nothing to one that has ended."""
        self._transport.write(framed(job))
        for part in parts:
            await self._writable.wait()
            if self._transport.is_closing():
                return
            self._transport.write(framed(part))

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, start_ns: int) -> None:
        self.begun = True
        self._transport.write(framed(Start(start_ns)))

    def halt(self, how: Stop) -> None:
        if not self._transport.is_closing():  # else it is gone: a signal to the whole process group reaches it too
            self._transport.write(framed(Halt(how)))

    async def close(self) -> None:
        """It is gone afterwards."""
        self._transport.abort()
        for future in (self.ready, self.report):
            future.cancel()
        try:
            await asyncio.to_thread(self._process.wait, _END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        finally:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()

    # asyncio.Protocol
    def data_received(self, data: bytes) -> None:
        for data_ in self._frames.feed(data):
            match decode_from_sender(data_):
                case Ended(outcomes):
                    self._on_ended(outcomes)
                case Ready():
                    self.ready.set_result(None)
                case Refused(text):
                    self._fail(UsageError(text))
                case Report(report):
                    self.report.set_result(report)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        if self.ready.done() and self.report.done():
            return  # all is told, or it was we who hung up: it may not even know yet
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.returncode
        self._fail(SenderDiedError(f"a sender process ended early, with code {code}"))

    def _fail(self, error: Exception) -> None:
        for future in (self.ready, self.report):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits hears it; nobody has to


def _launch() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The link to a new process, and the process."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            command = [sys.executable, "-m", "inferloop.bench.sender", str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C in the terminal is for us: it ends when we hang up
            )
            return ours, process
    except BaseException:
        ours.close()
        raise


def core_for(cores: tuple[int, ...], sender: int) -> int | None:
    """The core that a sender is bound to, if any. Raises UsageError for one that this process may not use."""
    if not cores:
        return None
    if cores[sender] not in os.sched_getaffinity(0):
        raise UsageError(f"core {cores[sender]} is not one that may be used here")
    return cores[sender]

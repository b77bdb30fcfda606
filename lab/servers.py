"""Servers of their own for tools that measure them, which end when the tool does, however it ends."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inferloop.fleet.act import guard

_PATIENCE_S = 10.0
"""Between the order to end and the end of it all."""


@dataclass(frozen=True, slots=True)
class Running:
    """`pid` is the program itself; between it and this process stands a guard."""

    pid: int
    began: float
    """When it was started, by time.perf_counter."""
    guard: subprocess.Popen[bytes]

    @property
    def returncode(self) -> int | None:
        return self.guard.poll()


@contextlib.contextmanager
def running(argv: Sequence[str], *, env: Mapping[str, str] | None = None, quiet: bool = False) -> Iterator[Running]:
    """A process, until the block ends or this process does. `quiet`: what it says on stdout is thrown away."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(theirs.fileno()), "--", *argv],
                env=env,
                stdout=subprocess.DEVNULL if quiet else None,
                pass_fds=(theirs.fileno(),),
            )
        try:
            told = ours.recv(32)  # as soon as the program's process exists
            if not told:
                raise SystemExit(f"the guard of {argv[0]} ended with {process.wait()}")
            yield Running(int(told), time.perf_counter(), process)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_WR)
            process.wait()


@contextlib.contextmanager
def serving(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[Path]:
    """The port file of a server, whose path it gets as its last argument. The file's folder is the server's own."""
    with tempfile.TemporaryDirectory(prefix="inferloop-lab-") as folder:
        port_file = Path(folder) / "port.json"
        with running([*argv, str(port_file)], env=env) as server:
            while not port_file.exists():
                if server.returncode is not None:
                    raise SystemExit(f"the server ended with {server.returncode}")
                time.sleep(0.05)
            yield port_file

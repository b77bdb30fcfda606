"""What a process and all that it started use: processor time and memory, looked at ten times a second."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Self

import numpy as np
from lab.null_server import NullServer

_EVERY_S = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Looks while the block lasts, from `core`. Instants are monotonic ns."""

    def __init__(self, pid: int, server: NullServer, core: int) -> None:
        self._pid, self._server, self._core = pid, server, core
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._times: list[int] = []
        self._cpu_s: list[float] = []
        self._server_s: list[float] = []
        self.peak_rss_bytes = 0
        """Of all processes together, at the worst moment; shared pages count in each."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def shares(self, start_ns: int, end_ns: int) -> tuple[float, float]:
        """Of one core, by the processes and by the server, between two instants."""
        ends = np.array([start_ns, end_ns], np.float64)
        spans = [np.diff(np.interp(ends, self._times, used))[0] for used in (self._cpu_s, self._server_s)]
        return (spans[0] * 1e9 / (end_ns - start_ns), spans[1] * 1e9 / (end_ns - start_ns))

    def _look(self) -> None:
        os.sched_setaffinity(0, {self._core})
        while not self._over.wait(_EVERY_S):
            cpu_s, rss_bytes = usage(self._pid)
            self._times.append(time.monotonic_ns())
            self._cpu_s.append(max([cpu_s, *self._cpu_s[-1:]]))
            self._server_s.append(self._server.cpu_s())
            self.peak_rss_bytes = max(self.peak_rss_bytes, rss_bytes)


def usage(pid: int) -> tuple[float, int]:
    """(processor seconds, resident bytes) of a process, its children that ended included, and its living ones."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except (OSError, IndexError):
        return 0.0, 0
    cpu_s, rss_bytes = sum(map(int, fields[11:15])) / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES
    for child in children:
        more_s, more_bytes = usage(child)
        cpu_s, rss_bytes = cpu_s + more_s, rss_bytes + more_bytes
    return cpu_s, rss_bytes

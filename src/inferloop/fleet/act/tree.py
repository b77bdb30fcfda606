"""An engine and all that it has started, seen from outside: what it takes, and how it is held still."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import psutil


class ProcessTree:
    """By the pid of its root. What ends in between is left out; nothing here raises."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._held: list[psutil.Process] = []

    def memory_bytes(self) -> int:
        """Resident, of all of them; 0 when they are gone."""
        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def cpu_s(self) -> float:
        """Processor time that those which run now have used since they began."""
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def suspend(self) -> None:
        """Stop them all where they are (SIGSTOP), children last: who is stopped starts nobody. Idempotent."""
        for process in self._processes():
            if process not in self._held:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGSTOP)
                    self._held.append(process)

    def resume(self) -> None:
        """Let what was suspended go on, children first. Idempotent."""
        while self._held:
            with contextlib.suppress(psutil.Error):
                self._held.pop().send_signal(signal.SIGCONT)

    def _processes(self) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._pid)
            yield root
            yield from root.children(recursive=True)

"""Whether this machine had other work than ours: a frequent reason for numbers that nobody can repeat."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterable, Iterator

import psutil

from inferloop.backends.endpoint import Endpoint

_QUIET_PERCENT = 20.0
_OTHERS_PERCENT = 10.0
_WATCH_S = 0.5


async def busy_percent() -> float:
    """How busy this machine's processors are right now, 0 to 100, watched for half a second."""
    return await asyncio.to_thread(psutil.cpu_percent, _WATCH_S)


def busy_note(percent: float) -> str | None:
    """What to tell of it; None for a quiet machine. `percent` is taken before the run puts any load on the target."""
    if percent <= _QUIET_PERCENT:
        return None
    return (
        f"this machine was {percent:.0f} % busy before the run began; the client ran here, and so did the target if it "
        "is local: measure again when it is quiet"
    )


def others_note(percent: float | None) -> str | None:
    """What to tell of other work during a window; None where there was little, or it cannot be known."""
    if percent is None or percent <= _OTHERS_PERCENT:
        return None
    return f"other programs kept this machine {percent:.0f} % busy meanwhile"


class OtherWork:
    """How busy this machine's processors were with what is neither this program nor a target of it: the processes it
    started, and those that listen for a URL of this machine."""

    def __init__(self, targets: Iterable[Endpoint]) -> None:
        self._ports = {t.port for t in targets if _is_here(t.host)}
        self._since: tuple[float, float, float] | None = None

    def begin(self) -> None:
        self._since = self._seen()

    def percent(self) -> float | None:
        """Since `begin`, 0 to 100, over all processors. None where a local target's process cannot be found."""
        before, now = self._since, self._seen()
        if before is None or now is None or now[0] <= before[0]:
            return None
        span_s, busy_s, own_s = (b - a for a, b in zip(before, now, strict=True))
        return 100 * min(1.0, max(0.0, busy_s - own_s) / (span_s * (psutil.cpu_count() or 1)))

    def _seen(self) -> tuple[float, float, float] | None:
        """(now, what all processors have worked, what we have), in seconds."""
        roots = self._roots()
        if roots is None:
            return None
        times = psutil.cpu_times()
        names = ("user", "nice", "system", "irq", "softirq", "steal")
        return time.monotonic(), sum(getattr(times, name, 0.0) for name in names), sum(_worked_s(roots))

    def _roots(self) -> list[psutil.Process] | None:
        roots = {psutil.Process()}
        listening: dict[int, int | None] = {}
        if self._ports:
            with contextlib.suppress(psutil.Error, OSError):
                found = psutil.net_connections("tcp")
                listening = {c.laddr.port: c.pid for c in found if c.laddr and c.status == psutil.CONN_LISTEN}
        for port in self._ports:
            pid = listening.get(port)
            if pid is None:
                return None
            with contextlib.suppress(psutil.Error):
                roots.add(psutil.Process(pid))
        return list(roots)


def _worked_s(roots: Iterable[psutil.Process]) -> Iterator[float]:
    """Of the processes and all below them. What has ended counts at its parent."""
    every = set(roots)
    for root in roots:
        with contextlib.suppress(psutil.Error):
            every.update(root.children(recursive=True))
    for process in every:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            yield (
                times.user
                + times.system
                + getattr(times, "children_user", 0.0)
                + getattr(times, "children_system", 0.0)
            )


def _is_here(host: str) -> bool:
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return True
    return any(a.address == host for found in psutil.net_if_addrs().values() for a in found if a.family in _FAMILIES)


_FAMILIES = (socket.AF_INET, socket.AF_INET6)

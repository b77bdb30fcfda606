"""When to send: absolute deadlines from one start instant. Decides only; bench.drive sleeps and sends.

Deadlines never move: a late wake sends everything that is due, and nothing is re-anchored to "now", so the offered rate
does not drift. Lateness is kept (send minus intended) and counts in the response latencies. After a stall of the whole
client, catching up at once would be a burst that nobody asked for: what fell more than `max_catch_up_ns` behind during
the stall is forgone, counted and reported.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stall:
    """The client woke `late_ns` after a deadline, at `t_ns`, and gave up `num_forgone` requests."""

    t_ns: int
    late_ns: int
    num_forgone: int


class Pacer:
    """Owns the plan of one open-loop window. `offsets_ns` ascend from `start_ns`.

    `max_in_flight` makes the loop half closed: what is due waits for a free slot, its deadline stays.
    """

    def __init__(
        self,
        offsets_ns: Sequence[int],
        *,
        start_ns: int,
        max_catch_up_ns: int = 250_000_000,
        max_in_flight: int | None = None,
    ) -> None:
        self._deadlines = array("q", (start_ns + offset for offset in offsets_ns))
        self._max_catch_up_ns, self._max_in_flight = max_catch_up_ns, max_in_flight
        self._next = 0
        self._waiting: deque[int] = deque()
        self.stalls: list[Stall] = []
        self.forgone: list[int] = []
        self.num_capped = 0

    def deadline(self, index: int) -> int:
        return self._deadlines[index]

    @property
    def next_wake_ns(self) -> int | None:
        """When the next request falls due; None when all have."""
        return self._deadlines[self._next] if self._next < len(self._deadlines) else None

    @property
    def finished(self) -> bool:
        """Nothing is left to send."""
        return self._next >= len(self._deadlines) and not self._waiting

    @property
    def num_forgone(self) -> int:
        return len(self.forgone)

    def due(self, now_ns: int, num_in_flight: int = 0) -> list[int]:
        """Indices to send now, in order of their deadlines."""
        self._release(now_ns)
        room = len(self._waiting)
        if self._max_in_flight is not None:
            room = min(room, max(0, self._max_in_flight - num_in_flight))
            self.num_capped += room < len(self._waiting)
        return [self._waiting.popleft() for _ in range(room)]

    def _release(self, now_ns: int) -> None:
        wake = self.next_wake_ns
        if wake is None or wake > now_ns:
            return
        num_forgone = 0
        if now_ns - wake > self._max_catch_up_ns:
            oldest = now_ns - self._max_catch_up_ns
            first = self._next
            while self._next < len(self._deadlines) and self._deadlines[self._next] < oldest:
                self._next += 1
            num_forgone = self._next - first
            self.forgone += range(first, self._next)
            self.stalls.append(Stall(now_ns, now_ns - wake, num_forgone))
        while self._next < len(self._deadlines) and self._deadlines[self._next] <= now_ns:
            self._waiting.append(self._next)
            self._next += 1

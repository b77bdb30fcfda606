"""Time is injected. Durations come from a monotonic clock; a wall anchor is recorded once beside them."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What rooms need of time. Both in nanoseconds."""

    def now_ns(self) -> int:
        """Monotonic; on Linux CLOCK_MONOTONIC, shared by every process of one host."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch, for humans and for anchoring; never subtract two of these."""
        ...


class RealClock:
    """The machine's clocks."""

    now_ns = staticmethod(time.monotonic_ns)  # asked several times per token, so without a frame of its own
    wall_ns = staticmethod(time.time_ns)


class VirtualClock:
    """A clock that moves only when told to; owned by a test or by the simulator."""

    def __init__(self, start_ns: int = 0, wall_start_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_ns = start_ns
        self._wall_offset_ns = wall_start_ns - start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def wall_ns(self) -> int:
        return self._now_ns + self._wall_offset_ns

    def advance(self, ns: int) -> None:
        """Move forward by `ns` >= 0."""
        assert ns >= 0, "time does not run backwards"
        self._now_ns += ns

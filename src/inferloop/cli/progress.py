"""How far a model is fetched or loaded, for logs: a line every few seconds, none for what is done sooner."""

from __future__ import annotations

from collections.abc import Callable

from inferloop.core.clock import Clock
from inferloop.core.units import NS_PER_S, human_bytes

EVERY_S = 3


class ProgressLines:
    """Called as fetch.Progress is. A stage that has told a line tells its end, too."""

    def __init__(self, clock: Clock, tell: Callable[[str], None]) -> None:
        self._clock, self._tell = clock, tell
        self._stage, self._told_ns, self._tells_end = "", 0, False

    def __call__(self, stage: str, done: int, total: int) -> None:
        now_ns = self._clock.now_ns()
        if stage != self._stage:
            self._stage, self._told_ns, self._tells_end = stage, now_ns, False
        is_over = done >= total
        if (is_over and self._tells_end) or (not is_over and now_ns - self._told_ns >= EVERY_S * NS_PER_S):
            self._told_ns, self._tells_end = now_ns, not is_over
            self._tell(f"{stage}: {human_bytes(done)} of {human_bytes(total)}")

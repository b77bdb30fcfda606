"""How fast a batch gets on, and so when it will be done."""

from __future__ import annotations

from collections import deque

from inferloop.core.clock import Clock
from inferloop.core.units import NS_PER_S

WINDOW_S = 60.0


class Pace:
    """The rate of the last minute, or of the time since the first row was begun when that is shorter."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._t_begun_ns: int | None = None
        self._ended: deque[tuple[int, int]] = deque()

    def begin(self) -> None:
        """A row was begun."""
        if self._t_begun_ns is None:
            self._t_begun_ns = self._clock.now_ns()

    def end(self, num_tokens: int) -> None:
        """A row got its answer, of `num_tokens`."""
        self._ended.append((self._clock.now_ns(), num_tokens))
        self._forget()

    def rates(self) -> tuple[float, float] | None:
        """(rows per second, output tokens per second); None when no row ended lately."""
        self._forget()
        if not self._ended or self._t_begun_ns is None:
            return None
        span_ns = self._clock.now_ns() - max(self._t_begun_ns, self._horizon_ns())
        if span_ns <= 0:
            return None
        return len(self._ended) * NS_PER_S / span_ns, sum(n for _, n in self._ended) * NS_PER_S / span_ns

    def _horizon_ns(self) -> int:
        return self._clock.now_ns() - int(WINDOW_S * NS_PER_S)

    def _forget(self) -> None:
        horizon_ns = self._horizon_ns()
        while self._ended and self._ended[0][0] < horizon_ns:
            self._ended.popleft()

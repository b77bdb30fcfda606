"""One unfinished batch as far as it has come in this process, how fast it gets on, and so when it will be done."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from inferloop.core.clock import Clock
from inferloop.core.units import NS_PER_S
from inferloop.serve.batch.records import BatchRecord
from inferloop.serve.batch.wire import Progress

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


@dataclass(slots=True)
class Job:
    """Owned by the runner. `num_left` counts rows without a recorded answer, `num_running` those of them in work."""

    record: BatchRecord
    pace: Pace
    num_left: int = 0
    num_running: int = 0
    cancelled: bool = False
    deadline: asyncio.Timeout | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def cut(self) -> None:
        """End the work on rows now, as the end of the completion window would."""
        self.cancelled = True
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time())

    def progress(self) -> Progress:
        rates = self.pace.rates() if self.num_running else None
        if rates is None:
            return Progress(num_running=self.num_running, rows_per_s=None, tokens_per_s=None, eta_s=None)
        rows_per_s, tokens_per_s = rates
        return Progress(
            num_running=self.num_running,
            rows_per_s=round(rows_per_s, 3),
            tokens_per_s=round(tokens_per_s, 1),
            eta_s=round(self.num_left / rows_per_s, 1),
        )

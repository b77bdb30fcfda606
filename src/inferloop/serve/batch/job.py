"""One unfinished batch as far as it has come in this process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from inferloop.serve.batch.pace import Pace
from inferloop.serve.batch.records import BatchRecord
from inferloop.serve.batch.wire import Progress


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

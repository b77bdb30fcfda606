"""The parts of batch jobs in one replica, opened and closed together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from inferloop.core.units import NS_PER_S
from inferloop.serve.batch.desk import Desk
from inferloop.serve.batch.folder import Folder
from inferloop.serve.batch.kinds import KINDS
from inferloop.serve.batch.run import BatchRunner
from inferloop.serve.batch.store import Store
from inferloop.serve.metrics import BatchRows
from inferloop.serve.replica import Replica


def places_for_rows(max_running: int, max_waiting: int) -> int:
    """How many choices of rows an engine that runs and queues so many should hold: its whole batch, and an eighth more,
    so that the place of one that ends is taken in the next step. Their priority keeps them out of others' way."""
    return max_running + min(max(1, max_running // 8), max_waiting)


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """`folder` is held by this process; closing it is its opener's. At most `max_choices` of rows are in the engine at
    once (see `places_for_rows`), but for a row that has more of its own: at most `capacity`, which is what the engine
    can run and queue."""

    folder: Folder
    max_choices: int = 32
    capacity: int = 128


class Batches:
    """Made on the event loop. Raises UsageError for a database that is not ours."""

    def __init__(self, replica: Replica, config: BatchConfig) -> None:
        self.replica, self.folder = replica, config.folder
        store = Store(config.folder.database)
        config.folder.remove_others(store.file_ids())
        self.desk = Desk(store)
        self.runner = BatchRunner(replica, self.folder, self.desk, KINDS, config.max_choices, config.capacity)
        self._work: asyncio.Task[None] | None = None
        replica.metrics.batch_rows = self._rows

    def now_s(self) -> int:
        return self.replica.clock.wall_ns() // NS_PER_S

    def start(self) -> None:
        self._work = asyncio.create_task(self.runner.run())

    async def close(self) -> None:
        """Rows in work are dropped, to run again; what was answered is on disk."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        await self.desk.close()

    def _rows(self) -> BatchRows:
        jobs = self.runner.jobs.values()
        num_running = sum(job.num_running for job in jobs)
        # a row that has its answer leaves `num_left` a moment before `num_running`
        num_waiting = sum(max(0, job.num_left - job.num_running) for job in jobs)
        return BatchRows(num_waiting, num_running, **self.runner.num_answered)

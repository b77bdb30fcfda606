"""Works batches off, the oldest first, and takes up again what a stopped or killed server left.

A batch moves validating -> in_progress -> finalizing -> completed; a wrong file fails it, a cancel or the end of its
completion window cuts it short. The next batch begins as soon as the one before has its last rows in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Mapping

from inferloop.core.errors import InferloopError, RequestError
from inferloop.core.units import NS_PER_S
from inferloop.serve.batch.desk import Desk
from inferloop.serve.batch.folder import Folder
from inferloop.serve.batch.gate import Gate
from inferloop.serve.batch.input import Checked, Row, check_rows, read_body
from inferloop.serve.batch.job import Job, Pace
from inferloop.serve.batch.kinds import Kind
from inferloop.serve.batch.output import write_output
from inferloop.serve.batch.records import Answer, BatchRecord
from inferloop.serve.batch.row import answer_row
from inferloop.serve.batch.wire import UNFINISHED, Status
from inferloop.serve.replica import Replica

log = logging.getLogger("inferloop.serve")

_RETRY_S = 2.0
"""After a failure that is no row's: the engine or the disk."""
_POLL_S = 0.1
_CHUNK = 64


class BatchRunner:
    """Lives on one event loop. `num_answered` counts the rows that this process answered, by how they ended."""

    def __init__(
        self,
        replica: Replica,
        folder: Folder,
        desk: Desk,
        kinds: Mapping[str, Kind],
        max_choices: int,
        capacity: int,
    ) -> None:
        self._replica, self._folder, self._desk, self._kinds = replica, folder, desk, kinds
        self._capacity = capacity
        self._gate = Gate(max_choices)
        self._turn, self._validation = asyncio.Lock(), asyncio.Lock()
        self.jobs: dict[str, Job] = {}
        self.num_answered = {"completed": 0, "failed": 0}

    def now_s(self) -> int:
        return self._replica.clock.wall_ns() // NS_PER_S

    async def run(self) -> None:
        """Take up what is unfinished, and work until the replica drains; rows in work are then dropped, to run again
        after the next start."""
        try:
            await self._take_up()
            await self._replica.drain_began.wait()
        finally:
            tasks = [job.task for job in self.jobs.values() if job.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_up(self) -> None:
        while True:
            try:
                for record in await self._desk.ask(self._desk.store.unfinished):
                    self.add(record)
                return
            except sqlite3.Error as error:
                log.warning("batches cannot be read, tried again in %g s: %s", _RETRY_S, error)
                await asyncio.sleep(_RETRY_S)

    def add(self, record: BatchRecord) -> None:
        """Begin with a stored batch. While draining it waits for the next start."""
        if not self._replica.draining and record.id not in self.jobs:
            job = self.jobs[record.id] = Job(record, Pace(self._replica.clock), num_left=record.num_left)
            job.task = asyncio.create_task(self._work(job))
            if record.model != (served := self._replica.info.model_id):
                log.warning("batch %s waits for the model %s; this server has %s", record.id, record.model, served)

    async def cancel(self, batch_id: str) -> bool:
        """False when it is too late. Rows in the engine are aborted at once; the batch ends when they are gone."""
        if not await self._desk.ask(self._desk.store.cancel, batch_id, self.now_s()):
            return False
        if (job := self.jobs.get(batch_id)) is not None:
            job.cut()
        return True

    async def _work(self, job: Job) -> None:
        """Until the batch has ended, whatever fails on the way: everything that was recorded stays, the rest is begun
        again."""
        batch_id, failed = job.record.id, False
        try:
            while True:
                try:
                    if failed and await self._ended(job):
                        return
                    while self._must_wait(job):  # noqa: ASYNC110  another side's state
                        await asyncio.sleep(_POLL_S)
                    await self._try(job)
                    return
                except Exception as error:
                    text = str(error) if isinstance(error, InferloopError | OSError) else ""
                    log.warning("batch %s stopped, goes on in %g s: %s %s", batch_id, _RETRY_S, _names(error), text)
                failed = True
                await asyncio.sleep(_RETRY_S)
        finally:
            del self.jobs[batch_id]

    async def _ended(self, job: Job) -> bool:
        """After a failure: see how far the batch is recorded, which may be further than was heard."""
        await self._desk.settle()
        record = await self._desk.ask(self._desk.store.batch, job.record.id)
        assert record is not None, "batches are never deleted"
        job.record, job.num_left = record, record.num_left
        return record.status not in UNFINISHED

    def _must_wait(self, job: Job) -> bool:
        """For an engine that answers with the batch's model; not to end a batch, which needs none."""
        ends = job.cancelled or job.record.status in ("cancelling", "finalizing") or self._seconds_left(job) == 0
        able = self._replica.not_ready() is None and job.record.model == self._replica.info.model_id
        return self._replica.draining or not (ends or able)

    def _seconds_left(self, job: Job) -> int | None:
        """Of the completion window; None when all rows were answered in it."""
        return None if job.record.status == "finalizing" else max(0, job.record.expires_at - self.now_s())

    async def _try(self, job: Job) -> None:
        """The whole way from where the batch stands."""
        store, record = self._desk.store, job.record
        ending: Status = "completed"
        job.cancelled = job.cancelled or record.status == "cancelling"
        try:
            async with asyncio.timeout(0 if job.cancelled else self._seconds_left(job)) as job.deadline:
                await asyncio.sleep(0)  # a window that has ended ends here
                if record.status == "validating" and await self._refused(job):
                    return
                if record.status != "finalizing":
                    await self._answer(job)
        except TimeoutError:
            if job.deadline is None or not job.deadline.expired():
                raise  # the disk's
            ending = "expired"
        finally:
            job.deadline = None
        if ending == "completed" and not await self._desk.ask(store.finalize, record.id, self.now_s()):
            job.cancelled = True
        if job.cancelled:
            ending = "cancelled"
        await self._desk.settle()
        at_s = self.now_s()
        output, errors = await write_output(self._desk, self._folder, record, ending, at_s)
        await self._desk.ask(store.finish, record.id, ending, output, errors, at_s)

    async def _refused(self, job: Job) -> bool:
        """Check the whole file; True when it was wrong, and the batch has ended with that."""
        store, record = self._desk.store, job.record
        async with self._validation:
            abandoned = threading.Event()
            try:
                checked = await asyncio.to_thread(self._check, record, abandoned)
            finally:
                abandoned.set()  # nothing else stops the thread, and the process would wait for it
        if errors := checked.all_errors():
            return await self._desk.ask(store.refuse, record.id, errors, self.now_s())
        if await self._desk.ask(store.begin, record.id, checked.rows, self.now_s()):
            job.num_left = len(checked.rows)
        return False

    def _check(self, record: BatchRecord, abandoned: threading.Event) -> Checked:
        info, kind = self._replica.info, self._kinds[record.endpoint]

        def check_body(body: bytes) -> int:
            if len(body) > self._replica.config.max_body_bytes:
                raise RequestError("the body is too large", param="body", code="request_too_large")
            num_choices = kind.check(body, info)
            if kind.at_once and num_choices > self._capacity:  # it would meet a full queue for ever
                message = f"this server runs and queues {self._capacity} choices, the row has {num_choices}"
                raise RequestError(message, param="n", code="too_many_choices")
            return num_choices

        def rest(seconds: float) -> None:
            if abandoned.wait(seconds):
                raise InterruptedError

        path, max_body_bytes = self._folder.file(record.input_file_id), self._replica.config.max_body_bytes
        return check_rows(path, record.endpoint, check_body, max_body_bytes=max_body_bytes, rest=rest)

    async def _answer(self, job: Job) -> None:
        """Every row that has no answer yet. Cancelled, the rows in the engine are aborted before this ends."""
        store, batch_id, after = self._desk.store, job.record.id, 0
        # the turn is given up with the last row begun, so that the batch behind takes the places that become free
        async with asyncio.TaskGroup() as group, self._turn:
            while chunk := await self._desk.ask(store.pending, batch_id, after=after, limit=_CHUNK):
                for row in chunk:
                    await self._gate.enter(row.num_choices)
                    self._begin(group, job, row)
                after = chunk[-1].number

    def _begin(self, group: asyncio.TaskGroup, job: Job, row: Row) -> None:
        job.num_running += 1
        job.pace.begin()

        def ended(_: asyncio.Task[None]) -> None:
            job.num_running -= 1
            self._gate.leave(row.num_choices)

        # not a `finally` of the task: one that is cancelled before it begins runs none
        group.create_task(self._answer_one(job, row)).add_done_callback(ended)

    async def _answer_one(self, job: Job, row: Row) -> None:
        record = job.record
        body = await asyncio.to_thread(read_body, self._folder.file(record.input_file_id), row)
        answer = await answer_row(self._replica, self._kinds[record.endpoint], record.id, row, body)
        await self._desk.record(answer)
        self._count(job, answer)

    def _count(self, job: Job, answer: Answer) -> None:
        job.num_left -= 1
        job.pace.end(answer.tokens.num_output)
        self.num_answered[answer.state] += 1


def _names(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return " + ".join(sorted({_names(inner) for inner in error.exceptions}))
    return type(error).__name__

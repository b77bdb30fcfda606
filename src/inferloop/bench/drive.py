"""Load on one URL. Whatever the plan is, one loop sends what its agenda says is due, and stamps what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace

from inferloop.backends.http import HttpClient
from inferloop.bench.agenda import Agenda, turns_of
from inferloop.bench.attempt import Attempt, attempt
from inferloop.bench.client.endpoint import Endpoint
from inferloop.bench.render import RenderedRequest
from inferloop.bench.window import DriveOptions, DriveResult, OnDone, Stop, StopWhen
from inferloop.core.clock import Clock, RealClock
from inferloop.core.units import NS_PER_MS, NS_PER_S

__all__ = ["drive", "DriveOptions", "DriveResult", "Endpoint", "OnDone", "Stop", "StopWhen"]


async def drive(
    requests: Sequence[RenderedRequest],
    target: Endpoint,
    options: DriveOptions | None = None,
    *,
    on_done: OnDone | None = None,
    stop_when: StopWhen | None = None,
) -> DriveResult:
    """Send the requests when they are due, and wait for their answers.

    A request whose `after` is None is due `at_s` after the start of the window; one that follows another, `at_s` after
    that one's end. `on_done(position, timing)` is called as each ends, in any order, in the calling process and on its
    event loop; what it raises ends the window and is raised here. `stop_when(timings)`, asked after each, ends the
    window early. Cancelling the call censors every request in flight and raises. Raises UsageError for a plan that
    cannot be followed.
    """
    client = HttpClient(target.url)
    with _quiet_collector():  # its collection comes before the window, and before the budget starts to run
        run = _Run(requests, client, options or DriveOptions(), on_done, stop_when, RealClock())
        try:
            await run.run()
        finally:
            await run.cancel_rest()
            await client.close()
    return run.result()


class _Run:
    def __init__(
        self,
        requests: Sequence[RenderedRequest],
        client: HttpClient,
        options: DriveOptions,
        on_done: OnDone | None,
        stop_when: StopWhen | None,
        clock: Clock,
    ) -> None:
        self._requests, self._client, self._options = requests, client, options
        self._on_done, self._stop_when, self._clock = on_done, stop_when, clock
        self._result = DriveResult()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped: Stop | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._num_started = 0
        self._num_in_flight = 0
        self._gauge_ns = 0
        self._integral = 0
        self._first_send_ns: int | None = None
        self._agenda = Agenda(
            [r.timed for r in requests],
            max_catch_up_ns=round(options.max_catch_up_ms * NS_PER_MS),
            max_in_flight=options.max_in_flight,
        )
        self._turns = turns_of([r.timed for r in requests])
        self._start_ns = self._quiet_ns = clock.now_ns()
        budget_s = options.budget_s
        self._end_ns = None if budget_s is None else self._start_ns + round(budget_s * NS_PER_S)

    async def run(self) -> None:
        o = self._options
        agenda = self._agenda
        while not self._over():
            for position, intended in agenda.due(self._clock.now_ns() - self._start_ns, self._num_in_flight):
                self._start(position, None if intended is None else self._start_ns + intended)
            if agenda.finished and not self._num_in_flight:
                break
            wake = agenda.next_wake_ns
            if wake is None:
                wait_ns = self._quiet_ns + round(o.cut_off_s * NS_PER_S)
                if self._clock.now_ns() >= wait_ns:
                    return
            else:
                wait_ns = self._start_ns + wake
            await self._sleep_until(wait_ns if self._end_ns is None else min(wait_ns, self._end_ns))
        await self._wait_tasks(o.cut_off_s)

    async def cancel_rest(self) -> None:
        """Whatever is still in flight becomes censored."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def result(self) -> DriveResult:
        if self._failure is not None:
            raise self._failure
        r = self._result
        r.stopped = self._stopped
        r.stalls, r.num_forgone = self._agenda.stalls, self._agenda.num_forgone
        r.num_capped, r.num_dropped_turns = self._agenda.num_capped, self._agenda.num_dropped_turns
        r.num_unsent = len(self._requests) - self._num_started - r.num_forgone - r.num_dropped_turns
        if self._first_send_ns is not None:
            span = self._gauge_ns - self._first_send_ns
            r.in_flight = self._integral / span if span > 0 else None
        return r

    def _over(self) -> bool:
        late = self._end_ns is not None and self._clock.now_ns() >= self._end_ns
        return self._cut or late or self._stopped is not None

    @property
    def _cut(self) -> bool:
        """Nothing is waited for any more."""
        return self._stopped == "cut" or self._failure is not None

    def _start(self, index: int, t_intended_ns: int | None) -> None:
        self._num_started += 1
        self._quiet_ns = self._clock.now_ns()
        self._count(+1)
        task = asyncio.create_task(self._one(index, t_intended_ns))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, index: int, t_intended_ns: int | None) -> None:
        done = await attempt(
            self._client,
            self._requests[index],
            t_intended_ns=t_intended_ns,
            timeout_s=self._options.request_timeout_s,
            clock=self._clock,
        )
        self._count(-1)
        if index in self._turns:
            turn, num_turns = self._turns[index]
            done = replace(done, timing=replace(done.timing, turn=turn, num_turns=num_turns))
        self._keep(done)
        self._agenda.ended(index, done.timing.t_end_ns - self._start_ns, failed=not done.timing.ok)
        try:
            if self._on_done is not None and self._failure is None:
                self._on_done(index, done.timing)
            if self._stop_when is not None and self._stopped is None:
                self._stopped = self._stop_when(self._result.timings)
        except Exception as failure:  # in a task of its own it would be lost
            self._failure = failure
        self._changed.set()

    def _keep(self, done: Attempt) -> None:
        r, timing = self._result, done.timing
        if self._options.keep_timings:
            r.timings.append(timing)
        if timing.error is not None and done.detail is not None:
            r.details.setdefault(timing.error, done.detail)
        if done.stream is not None and timing.ok:
            r.counted_by[done.stream.counted_by] += 1
            r.num_count_mismatches += done.stream.count_mismatch
            told = done.stream.num_input_tokens
            r.num_length_mismatches += told is not None and told != timing.num_input_tokens

    def _count(self, change: int) -> None:
        now_ns = self._clock.now_ns()
        if self._first_send_ns is None:
            self._first_send_ns = self._gauge_ns = now_ns
        self._integral += self._num_in_flight * (now_ns - self._gauge_ns)
        self._gauge_ns = now_ns
        self._num_in_flight += change

    async def _sleep_until(self, deadline_ns: int) -> None:
        """Until the deadline, or until something ended."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, (deadline_ns - self._clock.now_ns()) / NS_PER_S)):
                await self._changed.wait()

    async def _wait_tasks(self, timeout_s: float) -> None:
        """Until all have ended, the window was stopped, or the cut-off passed."""
        deadline_ns = self._clock.now_ns() + round(timeout_s * NS_PER_S)
        while self._tasks and not self._cut:
            left_s = (deadline_ns - self._clock.now_ns()) / NS_PER_S
            if left_s <= 0:
                return
            await asyncio.wait(set(self._tasks), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Garbage collection pauses of hundreds of milliseconds would show as the server's: none inside the window."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()

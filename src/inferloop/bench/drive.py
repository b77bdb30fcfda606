"""Load on one URL: closed with one in flight, all at once, or open on a plan. Stamps come from the client's reader."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from inferloop.backends.http import HttpClient
from inferloop.bench.attempt import Attempt, attempt
from inferloop.bench.pace import Pacer, Stall
from inferloop.bench.render import RenderedRequest
from inferloop.core.clock import Clock, RealClock
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.summary import Mode
from inferloop.measure.timing import RequestTiming


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """`cut_off_s` after the last send (of a serial window: after each), what is unfinished is censored. `max_in_flight`
    caps an open loop."""

    request_timeout_s: float = 120.0
    cut_off_s: float = 60.0
    budget_s: float | None = None
    """No new request is sent after this long."""
    max_in_flight: int | None = None
    max_catch_up_ms: float = 250.0


Stop = Literal["cut", "drain"]
"""Nothing more is sent; what is in flight is censored (cut) or waited for (drain)."""


@dataclass
class DriveResult:
    """What one point saw. `in_flight` is the client's own gauge averaged over first send to last end.

    `num_unsent` counts requests of the plan that were not sent because the window was ended early; those forgone after
    a stall are apart.
    """

    timings: list[RequestTiming] = field(default_factory=list)
    stopped: Stop | None = None
    """How `stop_when` ended the window, if it did."""
    in_flight: float | None = None
    num_unsent: int = 0
    num_forgone: int = 0
    stalls: tuple[Stall, ...] = ()
    num_capped: int = 0
    num_count_mismatches: int = 0
    num_length_mismatches: int = 0
    counted_by: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    """One example text per error class."""


OnDone = Callable[[int, RequestTiming], None]
StopWhen = Callable[[Sequence[RequestTiming]], Stop | None]


async def drive(
    requests: Sequence[RenderedRequest],
    client: HttpClient,
    mode: Mode,
    options: DriveOptions = DriveOptions(),
    *,
    on_done: OnDone | None = None,
    stop_when: StopWhen | None = None,
    clock: Clock | None = None,
) -> DriveResult:
    """Send the requests and wait for their answers.

    `on_done(index, timing)` is called as each ends, in any order; what it raises ends the window and is raised here.
    `stop_when(timings)`, asked after each, ends the window early. Cancelling the call cancels every request and raises.
    """
    with _quiet_collector():  # its collection comes before the window, and before the budget starts to run
        run = _Run(requests, client, options, on_done, stop_when, clock or RealClock())
        try:
            await {"serial": run.serial, "burst": run.burst, "open": run.open}[mode]()
        finally:
            await run.cancel_rest()
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
        budget_s = options.budget_s
        self._end_ns = None if budget_s is None else clock.now_ns() + round(budget_s * NS_PER_S)

    async def serial(self) -> None:
        for index in range(len(self._requests)):
            if self._over():
                return
            self._start(index, None)
            await self._wait_tasks(self._options.cut_off_s)
            if self._tasks:  # past the cut-off
                return

    async def burst(self) -> None:
        for index in range(len(self._requests)):
            self._start(index, None)
        await self._wait_tasks(self._options.cut_off_s)

    async def open(self) -> None:
        o = self._options
        pacer = Pacer(
            [round(r.timed.at_s * NS_PER_S) for r in self._requests],
            start_ns=self._clock.now_ns(),
            max_catch_up_ns=round(o.max_catch_up_ms * NS_PER_MS),
            max_in_flight=o.max_in_flight,
        )
        while not pacer.finished and not self._over():
            for index in pacer.due(self._clock.now_ns(), self._num_in_flight):
                self._start(index, pacer.deadline(index))
            await self._sleep_until(min((t for t in (pacer.next_wake_ns, self._end_ns) if t is not None), default=None))
        self._result.stalls, self._result.num_forgone = tuple(pacer.stalls), pacer.num_forgone
        self._result.num_capped = pacer.num_capped
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
        r.num_unsent = len(self._requests) - self._num_started - r.num_forgone
        if self._first_send_ns is not None and r.timings:
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
        task = asyncio.create_task(self._one(index, t_intended_ns))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, index: int, t_intended_ns: int | None) -> None:
        self._count(+1)
        done = await attempt(
            self._client,
            self._requests[index],
            t_intended_ns=t_intended_ns,
            timeout_s=self._options.request_timeout_s,
            clock=self._clock,
        )
        self._count(-1)
        self._keep(done)
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

    async def _sleep_until(self, deadline_ns: int | None) -> None:
        """Until the deadline; with a cap or a stop rule also until something finished."""
        delay_s = None if deadline_ns is None else max(0.0, (deadline_ns - self._clock.now_ns()) / NS_PER_S)
        if self._options.max_in_flight is None and self._stop_when is None and delay_s is not None:
            await asyncio.sleep(delay_s)
            return
        self._changed.clear()
        if delay_s is None and not self._tasks:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
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

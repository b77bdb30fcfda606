"""The loop that sends: it does what the agenda says, at the instant it says, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from inferloop.backends.endpoint import Endpoint
from inferloop.bench.agenda import Agenda
from inferloop.bench.client.connection import Connection
from inferloop.bench.client.garbage import quiet_collector
from inferloop.bench.client.head import HeadWriter
from inferloop.bench.client.pool import Pool
from inferloop.bench.client.priority import priority
from inferloop.bench.client.timer import make_timer
from inferloop.bench.exchange import CUT_OFF, Exchange, Outcome
from inferloop.bench.plan import NONE
from inferloop.bench.share import Share
from inferloop.bench.window import TICK_NS, DriveOptions, SenderStats, Stop
from inferloop.core.units import NS_PER_MS, NS_PER_S

_AT_START_NS = NS_PER_MS
_TOGETHER = 32
_LEFT_AFTER_NS = NS_PER_S // 4
"""How long the end of an HTTP body is waited for when the answer in it is complete: a busy server may send it late, and
then its connection can still be used."""
_UNSURE_SHARE = 0.01
"""Of the requests, that may be sent again where it is not certain that the server never got them: of the failures of
one that resets connections no more may be hidden than this."""


class EngineReport(msgspec.Struct, array_like=True):
    """What a sender tells at the end of a window. `spans`: first send and last end; `in_flight_ns`: the integral over
    time of its gauge of requests in flight."""

    stats: SenderStats
    num_started: int
    num_forgone: int
    num_dropped_turns: int
    num_capped: int
    stalls: list[tuple[int, int, int]]
    in_flight_ns: int
    first_send_ns: int | None
    last_end_ns: int


class Engine:
    """One window of one sender. `deliver` gets each outcome, `tick` is called about every 10 ms."""

    def __init__(
        self,
        share: Share,
        endpoint: Endpoint,
        options: DriveOptions,
        id_base: int,
        *,
        deliver: Callable[[Outcome], None],
        tick: Callable[[], None] | None = None,
    ) -> None:
        """Raises UsageError for an endpoint that cannot be spoken to."""
        self._share, self._options = share, options
        self._deliver, self._on_tick = deliver, tick
        self._head = HeadWriter(endpoint, id_base)
        self._pool = Pool(endpoint, max_connections=options.max_connections)
        self._agenda = Agenda(
            share.steps,
            max_catch_up_ns=round(options.max_catch_up_ms * NS_PER_MS),
            max_in_flight=options.max_in_flight,
        )
        self._now_ns = time.monotonic_ns
        self._in_flight: dict[Exchange, None] = {}  # in the order of their sends
        self._sending, self._is_pumping = True, False
        self._over = asyncio.Event()
        self._armed_ns: int | None = None
        self._answered: deque[Exchange] = deque()  # in that order
        self._num_started = self._num_stale = self._num_unsure = self._num_bytes_sent = self._num_left = 0
        self._gauge_ns = self._integral = self._last_end_ns = 0
        self._first_send_ns: int | None = None
        self._lags, self._errors = array("q"), array("q")

    async def prepare(self) -> None:
        """Open connections: as many as asked for, but no more than requests can be in flight, and enough for those
        that are due at the start."""
        steps = self._share.steps
        heads = [at_ns for at_ns, after in zip(steps.at_ns, steps.after, strict=True) if after == NONE]
        at_start = sum(at_ns <= _AT_START_NS for at_ns in heads)
        count = min(len(heads), max(self._options.num_connections, at_start))
        await self._pool.open(min(count, self._options.max_in_flight or count))

    async def run(self, start_ns: int) -> EngineReport:
        """Send from `start_ns` on and wait for the answers. Cancelling it censors what is in flight."""
        loop = self._loop = asyncio.get_running_loop()
        num_before = self._pool.num_late
        with quiet_collector() as pauses_ns:
            self._start_ns = self._quiet_ns = start_ns
            budget_s = self._options.budget_s
            self._end_ns = None if budget_s is None else start_ns + round(budget_s * NS_PER_S)
            self._timer, self._ticker = make_timer(loop, self._woken), make_timer(loop, self._ticked)
            self._next_tick_ns = max(start_ns, self._now_ns()) + TICK_NS
            self._ticker.arm(self._next_tick_ns)
            cpu_ns = time.process_time_ns()
            try:
                if len(self._share):
                    self._arm()
                    self._check_over()
                    await self._over.wait()
            finally:
                self.stop("cut")
                late_ns = self._now_ns() - self._next_tick_ns
                if late_ns > 0:  # what held the loop up to the very end, so that the tick never came
                    self._lags.append(late_ns)
                self._timer.close()
                self._ticker.close()
                cpu_ns = time.process_time_ns() - cpu_ns
                window_ns = self._now_ns() - start_ns
                await self._pool.close()
        pool, agenda = self._pool, self._agenda
        stats = SenderStats(
            pid=os.getpid(),
            window_s=window_ns / NS_PER_S,
            cpu_s=cpu_ns / NS_PER_S,
            num_connections=pool.num_opened,
            num_late_connections=pool.num_late - num_before,
            num_pool_waits=pool.num_waits,
            num_stale_retries=self._num_stale,
            num_left_open=self._num_left,
            num_bytes_sent=self._num_bytes_sent,
            num_bytes_received=pool.num_bytes_received,
            peak_rss_bytes=_peak_rss_bytes(),
            loop_lags_ns=tuple(self._lags),
            timer_errors_ns=tuple(self._errors),
            collector_pauses_ns=tuple(pauses_ns),
            priority=priority(),
        )
        return EngineReport(
            stats,
            self._num_started,
            agenda.num_forgone,
            agenda.num_dropped_turns,
            agenda.num_capped,
            [(start_ns + s.t_ns, s.late_ns, s.num_forgone) for s in agenda.stalls],
            self._integral,
            self._first_send_ns,
            self._last_end_ns,
        )

    def stop(self, how: Stop) -> None:
        """End the window early, also one that has not begun."""
        if self._sending:
            self._sending = False
            self._quiet_ns = self._now_ns()
        if how == "cut":
            for exchange in list(self._in_flight):
                exchange.fail(*CUT_OFF)
        self._check_over()

    def _woken(self) -> None:
        if self._armed_ns is not None:
            self._errors.append(max(0, self._now_ns() - self._armed_ns))
            self._armed_ns = None
        self._pump()

    def _pump(self) -> None:
        """Send all that is due, and sleep until more is. What goes out together is made ready together: between two
        sends there is then nothing but the stamp."""
        self._is_pumping = False
        if self._sending:
            now_ns = self._now_ns()
            if self._end_ns is not None and now_ns >= self._end_ns:
                self.stop("drain")
            else:
                start_ns = self._start_ns
                due = self._agenda.due(now_ns - start_ns, len(self._in_flight))
                for i in range(0, len(due), _TOGETHER):
                    some = [
                        self._make(place, None if t is None else start_ns + t) for place, t in due[i : i + _TOGETHER]
                    ]
                    for exchange, connection in some:
                        if connection is not None:
                            exchange.start(connection)
        self._arm()

    def _pump_soon(self) -> None:
        """When all that has arrived by now has been stamped."""
        if not self._is_pumping and self._sending:
            self._is_pumping = True
            self._loop.call_soon(self._pump)

    def _arm(self) -> None:
        wake = self._agenda.next_wake_ns if self._sending else None
        wake_ns = None if wake is None else self._start_ns + wake
        if wake_ns != self._armed_ns:
            self._timer.arm(wake_ns)
            self._armed_ns = wake_ns

    def _make(self, place: int, t_intended_ns: int | None) -> tuple[Exchange, Connection | None]:
        """A request ready to go, and what it goes out on. Without an idle connection the cost of opening one counts as
        the server's, but a wait for one of those that are busy as the client's lateness."""
        position, path, body = self._share.take(place)
        payload = self._head.write(position, path, body)
        self._num_bytes_sent += len(payload)
        self._num_started += 1
        exchange = Exchange(self, place, position, payload, t_intended_ns)
        now_ns = exchange.t_begin_ns
        if self._first_send_ns is None:
            self._first_send_ns = self._gauge_ns = now_ns
        self._integral += len(self._in_flight) * (now_ns - self._gauge_ns)
        self._gauge_ns = self._quiet_ns = now_ns
        self._in_flight[exchange] = None
        connection = self._pool.take()
        if connection is None:
            if self._pool.has_room:
                exchange.start(None)
            self._pool.open_for(partial(self._connected, exchange))
        return exchange, connection

    def _connected(self, exchange: Exchange, connection: Connection | None, error: str, detail: str) -> bool:
        if exchange.done:
            return False
        if connection is None:
            exchange.fail(error, detail)
        else:
            exchange.start(connection)
        return True

    def send_again(self, exchange: Exchange, *, sure: bool) -> bool:
        if not sure and self._num_unsure > _UNSURE_SHARE * self._num_started:
            return False
        self._num_stale += 1
        self._num_unsure += not sure
        self._pool.open_for(partial(self._connected, exchange))
        return True

    def answered(self, exchange: Exchange) -> None:
        num_ended = self._num_started - len(self._in_flight)
        if 2 * self._num_left > num_ended:  # a server that ends none of its answers: nobody who waits is held up
            self._loop.call_soon(exchange.leave)
        else:
            self._answered.append(exchange)

    def left(self, exchange: Exchange) -> None:
        self._num_left += 1
        self._integral -= self._now_ns() - exchange.t_done_ns  # it was not in flight meanwhile

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        now_ns = self._now_ns()
        self._integral += len(self._in_flight) * (now_ns - self._gauge_ns)
        self._gauge_ns = now_ns
        self._last_end_ns = max(self._last_end_ns, outcome.t_end_ns)
        del self._in_flight[exchange]
        changed = self._agenda.ended(
            exchange.place, outcome.t_end_ns - self._start_ns, failed=outcome.error is not None
        )
        self._deliver(outcome)
        if changed:
            self._pump_soon()
        self._check_over()

    def _check_over(self) -> None:
        if not self._in_flight and (not self._sending or self._agenda.finished):
            self._over.set()

    def _ticked(self) -> None:
        """What need not be exact: time-outs, the budget, the cut-off. How late it comes tells how busy the loop is."""
        now_ns = self._now_ns()
        self._lags.append(max(0, now_ns - self._next_tick_ns))
        self._next_tick_ns = max(self._next_tick_ns + TICK_NS, now_ns)
        self._ticker.arm(self._next_tick_ns)
        oldest_ns = now_ns - round(self._options.request_timeout_s * NS_PER_S)
        while self._in_flight and (exchange := next(iter(self._in_flight))).t_begin_ns <= oldest_ns:
            exchange.fail("timeout", f"not complete within {self._options.request_timeout_s:g} s")
        while self._answered and self._answered[0].t_done_ns <= now_ns - _LEFT_AFTER_NS:
            self._answered.popleft().leave()
        if self._sending and self._end_ns is not None and now_ns >= self._end_ns:
            self.stop("drain")
        nothing_left = not self._sending or self._agenda.num_left == 0
        if nothing_left and now_ns - self._quiet_ns >= self._options.cut_off_s * NS_PER_S:
            self.stop("cut")
        if self._on_tick is not None:
            self._on_tick()


def _peak_rss_bytes() -> int:
    """Of this program; the kernel's other count, in getrusage, goes on from that of the process that started it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

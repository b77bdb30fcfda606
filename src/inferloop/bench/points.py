"""One load level: its requests are drawn and rendered, sent, and what came of them is condensed and examined.

Each level draws prompts of its own, so that none meets a cache that an earlier one has warmed. An open level starts
with requests that are recorded but not measured, and its measured ones follow without a pause.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inferloop.bench.agenda import in_chains
from inferloop.bench.checks import self_checks
from inferloop.bench.decide import LEAD_SHARE
from inferloop.bench.drive import DriveOptions, DriveResult, Stop, drive
from inferloop.bench.fresh_cache import FreshCache
from inferloop.bench.options import BenchOptions, BenchProgress, Progress
from inferloop.bench.render import PromptCodec, RenderedRequest, Renderer
from inferloop.bench.result import PEAK, BenchPoint, Role, describe
from inferloop.bench.target import TargetInfo
from inferloop.contract.sample import SampledWorkload, expected_starts_s, sample_workload
from inferloop.contract.workload import Contract
from inferloop.core.clock import Clock
from inferloop.core.units import NS_PER_S
from inferloop.measure.balance import Balance, balance_of
from inferloop.measure.margin import margin_interval
from inferloop.measure.quantiles import min_samples
from inferloop.measure.samples import CENSORED
from inferloop.measure.saturation import saturation_of
from inferloop.measure.steady import steady_start
from inferloop.measure.summary import Mode, arrival_rate, summarize
from inferloop.measure.timing import RequestTiming, ttft_ms
from inferloop.measure.verdict import hopeless, judge
from inferloop.records.run import RunWriter

_JUDGE_EVERY = 8
_HOPELESS_FROM = 32
"""Slow requests come together, when the machine is busy for a moment; the bound takes them for independent."""
PEAK_LOOKS = 3
_PLAYED = ("trace", "profile")
"""They have a course of their own, and only the whole of it is what was declared."""
_ODD_ARRIVALS = 0.05
_LEAST_PLANNED = 20
_LEAST_WINDOW_SHARE = 0.1
"""Of the budget: how long an open point is measured at least, though the time is spent."""
_LATE_ARRIVALS = 1.15
"""By chance the arrivals of a plan take longer than their rate says: rather a little over than short of the floor."""
_SPARE = 1.1  # a few more requests than the floor, for those that end without a value
_LEAST_DRAIN_S, _DRAIN_ANSWERS = 1.0, 4.0
_LEAST_GROWING_S = 5.0
_GROWING_ANSWERS = 4.0
"""For how long, and for how many answers' time, a queue has to grow before a level is given up."""
_GIVEN_UP_FROM = 0.5
"""Of the requests of a certified level, below which it is not given up: what it completes while it is given too much is
how much the service sustains."""
_MOST_SETTLING = 0.25
"""Of the measured requests: more is not given to the start afterwards."""


class Measurer:
    """Owns the levels measured so far, in order. `answer_s` is learned from serial."""

    def __init__(
        self,
        contract: Contract,
        target: TargetInfo,
        codec: PromptCodec,
        renderer: Renderer,
        options: BenchOptions,
        writer: RunWriter,
        progress: Progress | None,
        clock: Clock,
        end_ns: int,
        fresh: FreshCache,
    ) -> None:
        self._contract, self._target, self._codec, self._renderer = contract, target, codec, renderer
        self._options, self._writer, self._progress, self._clock = options, writer, progress, clock
        self._end_ns, self._fresh = end_ns, fresh
        self.points: list[BenchPoint] = []
        quantiles = [o.quantile for o in contract.slo.objectives]
        self.floor = math.ceil(min_samples(max(quantiles, default=0.95)) * _SPARE)
        self.answer_s = 1.0
        """How long an answer takes when it is alone; measured by the serial point."""

    @property
    def lead_s(self) -> float:
        """Long enough for the first requests to end, so that the measured ones meet a filled pipeline."""
        return min(self._options.max_warmup_s, 2 * self.answer_s)

    @property
    def overhead_s(self) -> float:
        """What an open level takes beside its window."""
        return self.lead_s + min(self._options.max_drain_s, 2 * self.answer_s)

    @property
    def left_s(self) -> float:
        return (self._end_ns - self._clock.now_ns()) / NS_PER_S

    @property
    def own_window_s(self) -> float:
        """For a load that sets its own rate: what is left but for the last answers."""
        drain_s = min(self._options.max_drain_s, max(_LEAST_DRAIN_S, _DRAIN_ANSWERS * self.answer_s))
        return max(self.left_s - drain_s, _LEAST_WINDOW_SHARE * self._options.budget_s)

    async def closed(self, name: str, mode: Mode, count: int, *, warmup: bool = False) -> BenchPoint:
        start_ns = self._clock.now_ns()
        planned, workload = await self._prepare(name, num_requests=count, arrivals="burst")
        budget_s = self._options.budget_s
        options = self._drive_options(budget_s=0.1 * budget_s if mode == "serial" else None, cut_off_s=0.2 * budget_s)
        num_warmup = len(planned) if warmup else 0
        result, measured = await self._drive(name, mode, planned, options, num_warmup)
        if mode == "serial" and measured:
            self.answer_s = max(0.01, sum(t.t_end_ns - t.t_send_ns for t in measured) / len(measured) / NS_PER_S)
        return self._point(name, "bracket", mode, None, planned, result, measured, workload, start_ns)

    async def peak(self, qps: float) -> BenchPoint:
        """The level that is judged: more requests while its verdict is open and the budget lasts."""
        window_s = max(0.0, self.left_s - self.overhead_s) / (1 + LEAD_SHARE)
        # One that the budget cannot certify is still measured for as long as there is time, at least a little.
        window_s = max(window_s, _LEAST_WINDOW_SHARE * self._options.budget_s)
        most = self.floor * PEAK_LOOKS
        count = max(min(most, math.floor(qps * window_s)), min(most, _LEAST_PLANNED))
        return await self.open(PEAK, "judged", qps, count, window_s)

    async def open(self, name: str, role: Role, qps: float, num_requests: int, window_s: float) -> BenchPoint:
        """`num_requests` at `qps`, or as many as come in `window_s`, after the start."""
        start_ns = self._clock.now_ns()
        lead_s = max(self.lead_s, min(self._options.max_warmup_s, LEAD_SHARE * window_s))
        planned, workload = await self._prepare(name, num_requests=num_requests + math.ceil(qps * lead_s), qps=qps)
        starts_s = expected_starts_s(workload.requests)
        num_warmup = min(sum(s < lead_s for s in starts_s), len(planned) // 2)
        options = self._drive_options(budget_s=lead_s + _LATE_ARRIVALS * window_s)
        result, measured = await self._drive(name, "open", planned, options, num_warmup, role)
        measured = self._settled(name, result, measured)
        self._writer.update(warmup_s=starts_s[num_warmup], window_s=_span_s(measured))
        balance = None
        if measured and self._contract.traffic.arrivals.ramp is None:
            balance = balance_of(result.timings, since_ns=min(t.t_send_ns for t in measured))
        return self._point(name, role, "open", qps, planned, result, measured, workload, start_ns, balance)

    def _settled(self, name: str, result: DriveResult, measured: list[RequestTiming]) -> list[RequestTiming]:
        t_ns = settled_ns(result.timings, measured, self.floor)
        if t_ns is None:
            return measured
        self._writer.settle(name, t_ns)
        return [t for t in measured if t.t_send_ns >= t_ns]

    async def own_load(self, process: str) -> BenchPoint:
        """One point for what sets its own rate: a trace or a profile as long as the budget lasts, users who wait, a
        burst."""
        start_ns = self._clock.now_ns()
        window_s = self.own_window_s
        users = self._contract.traffic.arrivals.users or 0
        count = self.floor * PEAK_LOOKS + users
        how: dict[str, Any] = {"duration_s": window_s} if process in _PLAYED else {"num_requests": count}
        planned, workload = await self._prepare(process, arrivals=process, **how)
        mode: Mode = "closed" if process == "closed" else "open"
        options = self._drive_options(budget_s=window_s)
        # The first question of every user comes at the start, together with those of all others.
        num_warmup = min(users, len(planned) // 2)
        result, measured = await self._drive(process, mode, planned, options, num_warmup, "judged")
        self._writer.update(warmup_s=0.0, window_s=_span_s(measured))
        return self._point(process, "judged", mode, workload.offered_qps, planned, result, measured, workload, start_ns)

    async def _prepare(self, name: str, **how: Any) -> tuple[tuple[RenderedRequest, ...], SampledWorkload]:
        workload = await asyncio.to_thread(
            sample_workload,
            self._contract,
            seed=self._options.seed,
            stream=name,
            context_limit=self._target.context_length,
            count_tokens=lambda text: len(self._codec.encode_text(text)),
            **how,
        )
        planned = await asyncio.to_thread(self._renderer.render, workload.requests, self._fresh.fields(name))
        return planned, workload

    async def _drive(
        self,
        name: str,
        mode: Mode,
        planned: Sequence[RenderedRequest],
        options: DriveOptions,
        num_warmup: int,
        role: Role = "bracket",
    ) -> tuple[DriveResult, list[RequestTiming]]:
        """(what was seen, the measured requests: all but the first `num_warmup` of the plan)."""
        measured: list[RequestTiming] = []
        num_done = 0
        least = max(_HOPELESS_FROM, _GIVEN_UP_FROM * len(planned) if role == "certified" else 0)

        def keep(index: int, timing: RequestTiming) -> None:
            nonlocal num_done
            num_done += 1
            self._writer.append(timing, point=name, warmup=index < num_warmup)
            if index >= num_warmup:
                measured.append(timing)
            if self._progress is not None:
                self._progress(BenchProgress(name, num_done, len(planned)))

        def stop(_: Sequence[RequestTiming]) -> Stop | None:
            """Rarely: judging takes the event loop's time, and each look is one more chance to be wrong."""
            # A burst is for the most that can be completed and keeps no objective; the others are played to their end.
            if not measured or mode == "burst" or name in _PLAYED:
                return None
            if len(measured) % _JUDGE_EVERY == 0 and len(measured) >= least and self._is_lost(measured):
                return "cut"
            if role != "judged" and mode == "open":
                return None
            decided = len(measured) % self.floor == 0 and judge(self._contract.slo, measured).verdict
            return "drain" if decided in ("pass", "fail") else None

        plan = planned
        if mode == "serial":
            timed = in_chains([r.timed for r in planned], 1)
            plan = [replace(r, timed=t) for r, t in zip(planned, timed, strict=True)]
        await self._fresh.empty()
        with self._writer.stage(name, mode=mode, num_requests=len(planned)):
            result = await drive(plan, self._target.endpoint, options, on_done=keep, stop_when=stop)
        return result, measured

    def _is_lost(self, measured: Sequence[RequestTiming]) -> bool:
        """Whether more requests would not save the objectives: too many are over their limits already, or the service
        is given more than it can do, and is over a limit."""
        slo = self._contract.slo
        if hopeless(slo, measured):
            return True
        span_s = max(_LEAST_GROWING_S, _GROWING_ANSWERS * self.answer_s)
        growing = saturation_of(measured, window_s=max(120.0, 4 * span_s), least_span_s=span_s).saturated
        return growing and (judge(slo, measured).margin or 0.0) < 0

    def _point(
        self,
        name: str,
        role: Role,
        mode: Mode,
        qps: float | None,
        planned: Sequence[RenderedRequest],
        result: DriveResult,
        measured: Sequence[RequestTiming],
        workload: SampledWorkload,
        start_ns: int,
        balance: Balance | None = None,
    ) -> BenchPoint:
        # Where the window was ended as hopeless, what was cut off then is our doing: it is counted, and says nothing.
        judged = [t for t in measured if t.error != CENSORED] if result.stopped == "cut" else measured
        slo = judge(self._contract.slo, judged).of_load(balance)
        num_censored = sum(t.error == CENSORED for t in measured)
        summary = summarize(judged, mode=mode, offered_qps=qps)
        arrival_qps = arrival_rate(measured)
        summary = replace(summary, num_requests=len(measured), num_censored=num_censored, arrival_qps=arrival_qps)
        checks = self_checks(
            *(result, measured, planned, self._contract.slo, workload.prefix_reuse),
            exact_lengths=self._options.ignore_eos,
        )
        notes = list(checks.notes)
        if qps and arrival_qps and abs(arrival_qps / qps - 1) > _ODD_ARRIVALS:
            notes.append(f"by chance {arrival_qps:.3g} requests/s arrived in this window, not {qps:.3g}")
        if mode == "closed":
            notes.append("users wait for their answers: no request has an instant at which it should have been sent")
        if workload.num_clipped:
            notes.append(f"{workload.num_clipped} of {len(planned)} requests were shortened to fit the context")
        if workload.num_skipped:
            notes.append(f"{workload.num_skipped} requests of the trace were left out: failed there, empty or too long")
        if workload.num_later:
            notes.append(
                f"{workload.num_later} requests of the trace come after the time that the budget leaves: give it more, "
                "or the trace a smaller time_scale"
            )
        if result.stopped == "cut":
            unsent = f": {result.num_unsent} requests were not sent" if result.num_unsent else ""
            notes.append(f"ended early, as hopeless{unsent}")
        elif result.num_unsent and result.stopped is None:
            notes.append(f"out of time: {result.num_unsent} requests were not sent")
        point = BenchPoint(
            name=name,
            mode=mode,
            offered_qps=qps,
            summary=summary,
            slo=slo,
            role=role,
            margin=margin_interval(self._contract.slo, judged) if mode != "burst" else None,
            void=checks.void,
            notes=tuple(notes),
            num_warmup=len(result.timings) - len(measured),
            elapsed_s=(self._clock.now_ns() - start_ns) / NS_PER_S,
        )
        if measured:
            self.points.append(point)
        if self._progress is not None:
            told = describe(point) if measured else None
            self._progress(BenchProgress(name, len(result.timings), len(planned), told))
        return point

    def _drive_options(self, *, budget_s: float | None = None, cut_off_s: float | None = None) -> DriveOptions:
        o = self._options
        return DriveOptions(
            request_timeout_s=o.request_timeout_s,
            cut_off_s=o.max_drain_s if cut_off_s is None else cut_off_s,
            budget_s=budget_s,
        )


def settled_ns(timings: Sequence[RequestTiming], measured: Sequence[RequestTiming], floor: int) -> int | None:
    """When the steady state began, by MSER-5 over all requests of a level, where some of those `measured` after the
    lead still belong to the start. An open load starts from an empty service, so only a start that was lighter than the
    rest is one: a slow beginning is what users meet. None where nothing is to be given up."""
    start = steady_start(timings)
    if not measured or start.t_ns is None or not start.reached:
        return None
    rest = [t for t in measured if t.t_send_ns >= start.t_ns]
    early = [t for t in measured if t.t_send_ns < start.t_ns]
    if not early or len(early) > _MOST_SETTLING * len(measured) or len(rest) < min(len(measured), floor):
        return None
    means = [[w for t in part if (w := ttft_ms(t)) is not None] for part in (early, rest)]
    if not all(means) or sum(means[0]) / len(means[0]) >= sum(means[1]) / len(means[1]):
        return None
    return start.t_ns


def _span_s(measured: Sequence[RequestTiming]) -> float:
    sends = [t.t_send_ns for t in measured]
    return (max(sends) - min(sends)) / NS_PER_S if sends else 0.0

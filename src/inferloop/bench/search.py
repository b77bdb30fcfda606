"""The course of a bench run: warm-up, serial, burst, a search for the capacity between them, and the peak.

serial    one in flight: the best latency there is; a service that misses its objective here will miss it anywhere
burst     all at once: the most it completes, the upper end of the search
sweep     open loop at rates around the knee, each with enough requests to certify the objective's quantile
peak      open loop at the contract's peak rate: what the verdict is about
A contract whose arrivals set their own rate (a trace, a closed loop, a burst) has one point of these instead.
Each part draws prompts of its own, so that none meets a cache that an earlier one has warmed. An open point starts with
requests that are recorded but not measured, and its measured ones follow without a pause.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inferloop.backends.http import HttpClient
from inferloop.bench.agenda import in_chains
from inferloop.bench.checks import self_checks
from inferloop.bench.codecs import HttpCodec
from inferloop.bench.drive import DriveOptions, DriveResult, Endpoint, Stop, drive
from inferloop.bench.host import busy_note, busy_percent
from inferloop.bench.rates import FIRST_SHARE, next_rate
from inferloop.bench.render import PromptCodec, RenderedRequest, Renderer, RenderOptions
from inferloop.bench.result import BenchPoint, BenchResult, describe, frontier_of, saturated
from inferloop.bench.target import TargetInfo, describe_target
from inferloop.contract.sample import SampledWorkload, expected_starts_s, sample_workload
from inferloop.contract.workload import Contract
from inferloop.core.clock import Clock, RealClock
from inferloop.core.digest import plain
from inferloop.core.errors import RequestError, UsageError
from inferloop.core.units import NS_PER_S
from inferloop.measure.frontier import Capacity
from inferloop.measure.quantiles import min_samples
from inferloop.measure.samples import CENSORED
from inferloop.measure.summary import Mode, arrival_rate, summarize
from inferloop.measure.timing import RequestTiming
from inferloop.measure.verdict import hopeless, judge
from inferloop.records.run import RunWriter

_OWN_LOADS = ("trace", "closed", "burst")
"""Arrivals that leave no rate to search for."""
_JUDGE_EVERY = 8
_HOPELESS_FROM = 32
"""Slow requests come together, when the machine is busy for a moment; the bound takes them for independent."""
_PEAK_LOOKS = 3
_ODD_ARRIVALS = 0.05
_LEAST_PLANNED = 20
_LEAST_WINDOW_SHARE = 0.1
"""Of the budget: how long an open point is measured at least, though the time is spent."""
_LATE_ARRIVALS = 1.15
"""By chance the arrivals of a plan take longer than their rate says: rather a little over than short of the floor."""
_SPARE = 1.1  # a few more requests than the floor, for those that end without a value


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`budget_s` is for the whole run; the peak's share is kept for it. `peak_qps` replaces the contract's peak; 0
    leaves the peak out. `num_points` bounds the sweep."""

    seed: int = 0
    budget_s: float = 180.0
    num_points: int = 5
    num_warmup: int = 4
    num_serial: int = 12  # a median can be certified with 11
    num_burst: int = 32
    peak_qps: float | None = None
    as_chat: bool = True
    ignore_eos: bool = True
    request_timeout_s: float = 120.0
    max_warmup_s: float = 10.0
    max_drain_s: float = 30.0
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BenchProgress:
    """News of a run. `num_done` of `num_total` requests of the stage; `text` when a stage ended."""

    stage: str
    num_done: int
    num_total: int
    text: str | None = None


Progress = Callable[[BenchProgress], None]


async def run_bench(
    contract: Contract,
    target_url: str,
    model: str | None,
    codec: PromptCodec | None,
    options: BenchOptions,
    writer: RunWriter,
    progress: Progress | None = None,
    *,
    clock: Clock | None = None,
) -> BenchResult:
    """Measure one URL against a contract. `codec` None asks the target's /tokenize; `model` None takes its only model.

    Every request goes to `writer` as it ends, so that a cancelled run is readable; `writer.finish` is the caller's.
    Raises EnvironmentLacksError and UsageError when the target cannot be measured at all.
    """
    client = HttpClient(target_url)
    own_codec = None
    try:
        target = await describe_target(client, model=model)
        if codec is None:
            codec = own_codec = HttpCodec(target_url, target.model)
        writer.update(
            target=target.url,
            identity=target.identity,
            seed=options.seed,
            arrivals=contract.traffic.arrivals.process,
            options={**writer.header.options, "bench": plain(options)},
        )
        bench = _Bench(contract, client, target, codec, options, writer, progress, clock or RealClock())
        return await bench.run()
    finally:
        if own_codec is not None:
            own_codec.close()
        await client.close()


class _Bench:
    def __init__(
        self,
        contract: Contract,
        client: HttpClient,
        target: TargetInfo,
        codec: PromptCodec,
        options: BenchOptions,
        writer: RunWriter,
        progress: Progress | None,
        clock: Clock,
    ) -> None:
        self._contract, self._client, self._target = contract, client, target
        self._codec, self._options, self._writer = codec, options, writer
        self._progress, self._clock = progress, clock
        self._end_ns = clock.now_ns() + round(options.budget_s * NS_PER_S)
        self._renderer: Renderer
        self._points: list[BenchPoint] = []
        self._notes: list[str] = []
        quantiles = [o.quantile for o in contract.slo.objectives]
        self._num_certain = math.ceil(min_samples(max(quantiles, default=0.95)) * _SPARE)
        self._num_swept = 0
        self._answer_s = 1.0
        """How long an answer takes when it is alone; measured by the serial point."""
        self._burst_span_qps = 0.0
        """What a burst completed over its whole span, filling and draining included: a cautious first rate."""

    async def run(self) -> BenchResult:
        o = self._options
        busy = busy_note(await busy_percent())
        if busy:
            self._notes.append(busy)
        self._renderer = await self._usable_renderer()
        await self._closed("warmup", "serial", o.num_warmup, warmup=True)
        serial = await self._closed("serial", "serial", o.num_serial)
        if serial.void:
            return self._result("void", serial.void, serial)
        if serial.slo.verdict == "fail" or not serial.summary.achieved_qps:
            why = serial.slo.reasons or (self._failure(serial),)
            return self._result("fail", tuple(f"one request at a time: {text}" for text in why), serial)
        burst = await self._closed("burst", "burst", o.num_burst)
        process = self._contract.traffic.arrivals.process
        if process in _OWN_LOADS:
            own = await self._own_load(process)
            return self._result("void" if own.void else own.slo.verdict, own.void or own.slo.reasons, own)
        peak_qps = self._contract.traffic.qps.peak if o.peak_qps is None else o.peak_qps
        has_objective = bool(self._contract.slo.objectives)
        if has_objective:
            await self._sweep(serial, burst, reserve_s=self._seconds_for(peak_qps) if peak_qps else 0.0)
        if not peak_qps:
            return self._result("not declared", ("the peak was left out",), None)
        peak = await self._open("peak", peak_qps, num_looks=_PEAK_LOOKS)
        if has_objective and not frontier_of(self._points).capacity().low:  # there may be time to go lower
            await self._sweep(serial, burst, reserve_s=0.0)
        if peak.void:
            return self._result("void", peak.void, peak)
        return self._result(peak.slo.verdict, peak.slo.reasons, peak)

    async def _usable_renderer(self) -> Renderer:
        """Chats where the target has them, else texts, else token ids: whatever gives exact lengths."""
        o = self._options
        base = RenderOptions(self._target.model, ignore_eos=o.ignore_eos, extra=o.extra_body)
        ways = [base, replace(base, as_chat=False), replace(base, as_token_ids=True)]
        for way in ways if o.as_chat else ways[1:]:
            try:
                return await asyncio.to_thread(Renderer, self._codec, way)
            except (RequestError, UsageError) as problem:
                self._notes.append(f"{way.path} is not used: {problem}")
        raise UsageError(f"{self._target.url}: no prompts of exact lengths can be made: {self._notes[-1]}")

    async def _sweep(self, serial: BenchPoint, burst: BenchPoint, *, reserve_s: float) -> None:
        """Search with the time that is left after `reserve_s`."""
        serial_qps, burst_qps = serial.summary.achieved_qps, burst.summary.achieved_qps
        if not serial_qps or not burst_qps:
            return
        while (number := self._num_swept) < self._options.num_points:
            rate = next_rate(
                frontier_of(self._points).points,
                serial_qps=serial_qps,
                burst_qps=burst_qps,
                first_qps=FIRST_SHARE * min(burst_qps, self._burst_span_qps or burst_qps),
            )
            if rate is None:
                return
            if self._seconds_for(rate) > self._left_s() - reserve_s:
                self._notes.append(f"the budget left no time to measure {rate:.3g} queries/s")
                return
            self._num_swept += 1
            await self._open(f"sweep-{number + 1}", rate)

    async def _closed(self, name: str, mode: Mode, count: int, *, warmup: bool = False) -> BenchPoint:
        start_ns = self._clock.now_ns()
        planned, workload = await self._prepare(name, num_requests=count, arrivals="burst")
        budget_s = self._options.budget_s
        options = self._drive_options(budget_s=0.1 * budget_s if mode == "serial" else None, cut_off_s=0.2 * budget_s)
        num_warmup = len(planned) if warmup else 0
        result, measured = await self._drive(name, mode, planned, options, num_warmup)
        if mode == "serial" and measured:
            self._answer_s = max(0.01, sum(t.t_end_ns - t.t_send_ns for t in measured) / len(measured) / NS_PER_S)
        if mode == "burst" and measured:
            span_ns = max(t.t_end_ns for t in measured) - min(t.t_send_ns for t in measured)
            self._burst_span_qps = sum(t.ok for t in measured) * NS_PER_S / max(1, span_ns)
        return self._point(name, mode, None, planned, result, measured, workload, start_ns)

    async def _open(self, name: str, qps: float, *, num_looks: int = 1) -> BenchPoint:
        """`num_looks` times as many requests as the floor asks for, while the verdict is open and the budget lasts."""
        start_ns = self._clock.now_ns()
        lead_s = self._lead_s()
        window_s = max(0.0, self._left_s() - lead_s - min(self._options.max_drain_s, 2 * self._answer_s))
        most = self._num_certain * num_looks
        # A peak that the budget cannot certify is still measured for as long as there is time, at least a little.
        window_s = max(window_s, _LEAST_WINDOW_SHARE * self._options.budget_s)
        count = max(min(most, math.floor(qps * window_s)), min(most, _LEAST_PLANNED)) + math.ceil(qps * lead_s)
        planned, workload = await self._prepare(name, num_requests=count, qps=qps)
        starts_s = expected_starts_s(workload.requests)
        num_warmup = min(sum(s < lead_s for s in starts_s), len(planned) // 2)
        options = self._drive_options(budget_s=lead_s + _LATE_ARRIVALS * window_s)
        result, measured = await self._drive(name, "open", planned, options, num_warmup)
        self._writer.update(warmup_s=starts_s[num_warmup], window_s=_span_s(measured))
        return self._point(name, "open", qps, planned, result, measured, workload, start_ns)

    async def _own_load(self, process: str) -> BenchPoint:
        """One point for what sets its own rate: a trace as long as the budget lasts, users who wait, a burst."""
        start_ns = self._clock.now_ns()
        window_s = max(self._left_s() - self._options.max_drain_s, _LEAST_WINDOW_SHARE * self._options.budget_s)
        users = self._contract.traffic.arrivals.users or 0
        count = self._num_certain * _PEAK_LOOKS + users
        how: dict[str, Any] = {"duration_s": window_s} if process == "trace" else {"num_requests": count}
        planned, workload = await self._prepare(process, **how)
        options = self._drive_options(budget_s=window_s)
        # The first question of every user comes at the start, together with those of all others.
        result, measured = await self._drive(process, "open", planned, options, min(users, len(planned) // 2))
        self._writer.update(warmup_s=0.0, window_s=_span_s(measured))
        return self._point(process, "open", workload.offered_qps, planned, result, measured, workload, start_ns)

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
        planned = await asyncio.to_thread(self._renderer.render, workload.requests)
        return planned, workload

    async def _drive(
        self, name: str, mode: Mode, planned: Sequence[RenderedRequest], options: DriveOptions, num_warmup: int
    ) -> tuple[DriveResult, list[RequestTiming]]:
        """(what was seen, the measured requests: all but the first `num_warmup` of the plan)."""
        measured: list[RequestTiming] = []
        num_done = 0

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
            # A burst is for the most that can be completed and keeps no objective; a trace is played to its end.
            if not measured or mode == "burst" or name == "trace":
                return None
            if (
                len(measured) % _JUDGE_EVERY == 0
                and len(measured) >= _HOPELESS_FROM
                and hopeless(self._contract.slo, measured)
            ):
                return "cut"
            decided = len(measured) % self._num_certain == 0 and judge(self._contract.slo, measured).verdict
            return "drain" if decided in ("pass", "fail") else None

        plan = planned
        if mode == "serial":
            timed = in_chains([r.timed for r in planned], 1)
            plan = [replace(r, timed=t) for r, t in zip(planned, timed, strict=True)]
        with self._writer.stage(name, mode=mode, num_requests=len(planned)):
            result = await drive(plan, Endpoint(self._target.url), options, on_done=keep, stop_when=stop)
        return result, measured

    def _point(
        self,
        name: str,
        mode: Mode,
        qps: float | None,
        planned: Sequence[RenderedRequest],
        result: DriveResult,
        measured: Sequence[RequestTiming],
        workload: SampledWorkload,
        start_ns: int,
    ) -> BenchPoint:
        # Where the window was ended as hopeless, what was cut off then is our doing: it is counted, and says nothing.
        judged = [t for t in measured if t.error != CENSORED] if result.stopped == "cut" else measured
        slo = judge(self._contract.slo, judged)
        num_censored = sum(t.error == CENSORED for t in measured)
        summary = summarize(judged, mode=mode, offered_qps=qps)
        arrival_qps = arrival_rate(measured)
        summary = replace(summary, num_requests=len(measured), num_censored=num_censored, arrival_qps=arrival_qps)
        checks = self_checks(result, measured, planned, self._contract.slo, workload.prefix_reuse)
        notes = list(checks.notes)
        if qps and arrival_qps and abs(arrival_qps / qps - 1) > _ODD_ARRIVALS:
            notes.append(f"by chance {arrival_qps:.3g} requests/s arrived in this window, not {qps:.3g}")
        if workload.num_clipped:
            notes.append(f"{workload.num_clipped} of {len(planned)} requests were shortened to fit the context")
        if workload.num_skipped:
            notes.append(f"{workload.num_skipped} requests of the trace were left out: failed there, empty or too long")
        if result.stopped == "cut":
            notes.append(f"ended early, as hopeless: {result.num_unsent} requests were not sent")
        elif result.num_unsent and result.stopped is None:
            notes.append(f"out of time: {result.num_unsent} requests were not sent")
        point = BenchPoint(
            name=name,
            mode=mode,
            offered_qps=qps,
            summary=summary,
            slo=slo,
            void=checks.void,
            notes=tuple(notes),
            num_warmup=len(result.timings) - len(measured),
            elapsed_s=(self._clock.now_ns() - start_ns) / NS_PER_S,
        )
        if measured:
            self._points.append(point)
        if self._progress is not None:
            told = describe(point) if measured else None
            self._progress(BenchProgress(name, len(result.timings), len(planned), told))
        return point

    def _result(self, verdict: str, reasons: tuple[str, ...], judged: BenchPoint | None) -> BenchResult:
        frontier = frontier_of(self._points)
        capacity = frontier.capacity() if self._contract.slo.objectives else saturated(self._points)
        if judged is not None and judged.mode == "serial" and verdict == "fail":
            capacity = Capacity(0.0, 0.0, judged.summary.achieved_qps, "none", True, "one request at a time fails")
        voids = [f"{p.name}: {text}" for p in self._points if p.void for text in p.void]
        notes = tuple(dict.fromkeys([*self._notes, *voids]))
        return BenchResult(tuple(self._points), frontier, capacity, verdict, reasons, notes, judged)

    def _drive_options(self, *, budget_s: float | None = None, cut_off_s: float | None = None) -> DriveOptions:
        o = self._options
        return DriveOptions(
            request_timeout_s=o.request_timeout_s,
            cut_off_s=o.max_drain_s if cut_off_s is None else cut_off_s,
            budget_s=budget_s,
        )

    def _lead_s(self) -> float:
        """Long enough for the first requests to end, so that the measured ones meet a filled pipeline."""
        return min(self._options.max_warmup_s, 2 * self._answer_s)

    def _seconds_for(self, qps: float) -> float:
        return self._lead_s() + self._num_certain / qps + min(self._options.max_drain_s, 2 * self._answer_s)

    def _left_s(self) -> float:
        return (self._end_ns - self._clock.now_ns()) / NS_PER_S

    @staticmethod
    def _failure(point: BenchPoint) -> str:
        by_class = point.summary.errors["by_class"]
        return f"no request succeeded ({', '.join(f'{n} {c}' for c, n in by_class.items()) or 'none was answered'})"


def _span_s(measured: Sequence[RequestTiming]) -> float:
    sends = [t.t_send_ns for t in measured]
    return (max(sends) - min(sends)) / NS_PER_S if sends else 0.0

"""The course of a bench run: warm-up, serial, burst, a search for the capacity between them, and the peak.

serial    one in flight: the best latency there is; a service that misses its objective here will miss it anywhere
burst     all at once: the most it completes, the upper end of the search
scout-N   open loop, short: closes in on the rate at which the objectives are used up
rate-N    open loop, long: certifies a rate on each side of it
peak      open loop at the contract's peak rate: what the verdict is about
A contract whose arrivals set their own rate (a trace, a closed loop, a burst) has one point of these instead; so has a
rate profile that is to be played.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from inferloop.backends.endpoint import Endpoint
from inferloop.backends.http import HttpClient
from inferloop.bench.calibrate import Calibration, calibrate
from inferloop.bench.codecs import HttpCodec
from inferloop.bench.decide import FIRST_SHARE, LEAD_SHARE, Done, Limits, next_step
from inferloop.bench.fresh_cache import FreshCache
from inferloop.bench.host import busy_note, busy_percent
from inferloop.bench.options import BenchOptions, BenchProgress, Progress
from inferloop.bench.points import Measurer
from inferloop.bench.render import PromptCodec, Renderer, RenderOptions
from inferloop.bench.result import BenchPoint, BenchResult, failure_of, frontier_of, saturated
from inferloop.bench.target import Launched, TargetInfo, describe_target
from inferloop.contract.course import profile_s
from inferloop.contract.workload import Contract
from inferloop.core.clock import Clock, RealClock
from inferloop.core.digest import plain
from inferloop.core.errors import RequestError, UsageError
from inferloop.core.units import NS_PER_S
from inferloop.measure.frontier import Capacity
from inferloop.records.run import RunWriter

__all__ = ["BenchOptions", "BenchProgress", "Progress", "run_bench"]

_OWN_LOADS = ("trace", "closed", "burst", "profile")
"""Arrivals that leave no rate to search for."""


async def run_bench(
    contract: Contract,
    at: Endpoint | str,
    model: str | None,
    codec: PromptCodec | None,
    options: BenchOptions,
    writer: RunWriter,
    progress: Progress | None = None,
    *,
    clock: Clock | None = None,
    launched: Launched | None = None,
) -> BenchResult:
    """Measure one URL against a contract. `codec` None asks the target's /tokenize; `model` None takes its only model.
    `launched`: what is known of a target that was started for this.

    Every request goes to `writer` as it ends, so that a cancelled run is readable; `writer.finish` is the caller's.
    Raises EnvironmentLacksError and UsageError when the target cannot be measured at all, UsageError for a profile that
    the contract has not.
    """
    if options.profile and contract.traffic.rate_profile is None:
        raise UsageError("the contract has no traffic.rate_profile that could be played")
    client = HttpClient(at)
    own_codec = None
    try:
        target = await describe_target(client, model=model, launched=launched)
        if launched is not None and options.ignore_eos:
            options = replace(options, extra_body={**launched.exact_length, **options.extra_body})
        if codec is None:
            codec = own_codec = HttpCodec(target.endpoint, target.model)
        writer.update(
            target=target.url,
            identity=target.identity,
            seed=options.seed,
            arrivals=_process(contract, options),
            options={
                **writer.header.options,
                "bench": plain(options),
                **({"launched": plain(launched.told)} if launched is not None else {}),
            },
        )
        fresh = FreshCache(client, target.owner if options.fresh_cache else None)
        writer.update(options={**writer.header.options, "fresh_cache": fresh.way})
        bench = _Bench(contract, target, codec, options, writer, progress, clock or RealClock(), fresh)
        return await bench.run()
    finally:
        if own_codec is not None:
            own_codec.close()
        await client.close()


def _process(contract: Contract, options: BenchOptions) -> str:
    return "profile" if options.profile else contract.traffic.arrivals.process


class _Bench:
    def __init__(
        self,
        contract: Contract,
        target: TargetInfo,
        codec: PromptCodec,
        options: BenchOptions,
        writer: RunWriter,
        progress: Progress | None,
        clock: Clock,
        fresh: FreshCache,
    ) -> None:
        self._contract, self._target, self._codec, self._fresh = contract, target, codec, fresh
        self._options, self._writer, self._progress, self._clock = options, writer, progress, clock
        self._end_ns = clock.now_ns() + round(options.budget_s * NS_PER_S)
        self._measurer: Measurer
        self._calibration: Calibration | None = None
        self._notes: list[str] = list(target.endpoint.caveats)
        self._num_searched = 0
        self._short: str | None = None
        """Why the last search ended before its time, where it did."""

    async def run(self) -> BenchResult:
        o = self._options
        busy = busy_note(await busy_percent())
        if busy:
            self._notes.append(busy)
        if o.calibrate:
            self._calibration = await calibrate()
        renderer = await self._usable_renderer()
        self._measurer = m = Measurer(
            *(self._contract, self._target, self._codec, renderer, o, self._writer, self._progress, self._clock),
            *(self._end_ns, self._fresh),
        )
        await m.closed("warmup", "serial", o.num_warmup, warmup=True)
        serial = await m.closed("serial", "serial", o.num_serial)
        if serial.void:
            return self._result("void", serial.void, serial)
        if serial.slo.verdict == "fail" or not serial.summary.achieved_qps:
            why = serial.slo.reasons or (failure_of(serial),)
            return self._result("fail", tuple(f"one request at a time: {text}" for text in why), serial)
        burst = await m.closed("burst", "burst", o.num_burst)
        process = _process(self._contract, o)
        if process in _OWN_LOADS:
            self._note_length(process)
            own = await m.own_load(process)
            if not own.summary.num_requests:
                self._notes.append(
                    f"nothing was asked in the {m.own_window_s:.0f} s that the budget left: give it more"
                )
            return self._result("void" if own.void else own.slo.verdict, own.void or own.slo.reasons, own)
        peak_qps = self._contract.traffic.qps.peak if o.peak_qps is None else o.peak_qps
        has_objective = bool(self._contract.slo.objectives)
        if has_objective:
            await self._search(
                serial, burst, reserve_s=m.overhead_s + (1 + LEAD_SHARE) * m.floor / peak_qps if peak_qps else 0.0
            )
        if not peak_qps:
            return self._result("not declared", ("the peak was left out",), None)
        peak = await m.peak(peak_qps)
        if has_objective and not frontier_of(m.points).capacity().low:  # there may be time to go lower
            await self._search(serial, burst, reserve_s=0.0)
        if peak.void:
            return self._result("void", peak.void, peak)
        self._note_peak(peak, peak_qps)
        return self._result(peak.slo.verdict, peak.slo.reasons, peak)

    def _note_peak(self, peak: BenchPoint, qps: float) -> None:
        """How much time would have been enough, where it was not."""
        m = self._measurer
        missing = m.floor - peak.summary.num_requests
        if peak.slo.verdict == "inconclusive" and missing > 0:
            more_s = (1 + LEAD_SHARE) * missing / qps
            self._notes.append(
                f"{m.floor} requests can decide the peak, and {qps:g}/s brought {peak.summary.num_requests} in what "
                f"time was left: try --budget-s {math.ceil((self._options.budget_s + more_s) / 10) * 10:.0f}"
            )

    def _note_length(self, process: str) -> None:
        profile = self._contract.traffic.rate_profile
        if process != "profile" or profile is None:
            return
        whole_s, left_s = profile_s(profile), self._measurer.own_window_s
        if whole_s > left_s:
            self._notes.append(
                f"the budget leaves {left_s:.0f} s for a rate profile of {whole_s:.0f} s: give it more time, or the "
                "profile a smaller time_scale"
            )

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

    async def _search(self, serial: BenchPoint, burst: BenchPoint, *, reserve_s: float) -> None:
        """With the time that is left after `reserve_s`."""
        m = self._measurer
        serial_qps, burst_qps = serial.summary.achieved_qps, burst.summary.achieved_qps
        if not serial_qps or not burst_qps:
            return
        limits = Limits(
            *(serial_qps, burst_qps, FIRST_SHARE * burst_qps, self._options.num_points, m.floor, m.overhead_s),
            search_s=m.left_s - reserve_s,
            tail=1 - max(o.quantile for o in self._contract.slo.objectives),
        )
        while True:
            step = next_step(frontier_of(m.points), self._num_searched, m.left_s - reserve_s, limits)
            if isinstance(step, Done):
                self._short = step.reason if step.is_short and self._options.num_points else None
                return
            self._num_searched += 1
            name = f"{'scout' if step.role == 'scout' else 'rate'}-{self._num_searched}"
            await m.open(name, step.role, step.qps, step.num_requests, step.window_s)

    def _result(self, verdict: str, reasons: tuple[str, ...], judged: BenchPoint | None) -> BenchResult:
        points = self._measurer.points
        frontier = frontier_of(points)
        capacity = frontier.capacity() if self._contract.slo.objectives else saturated(points)
        if judged is not None and judged.mode == "serial" and verdict == "fail":
            capacity = Capacity(0.0, 0.0, judged.summary.achieved_qps, "none", True, "one request at a time fails")
        voids = [f"{p.name}: {text}" for p in points if p.void for text in p.void]
        if self._fresh.problem is not None:
            self._notes.append(f"the target's prefix cache was not emptied before each part: {self._fresh.problem}")
        if self._short is not None:
            self._notes.append(f"no certified rate on each side of the edge: {self._short}")
        notes = tuple(dict.fromkeys([*self._notes, *voids]))
        return BenchResult(tuple(points), frontier, capacity, verdict, reasons, notes, judged, self._calibration)

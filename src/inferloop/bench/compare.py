"""The course of a comparison: the same frozen requests on several targets, in turns.

warmup    every target answers a few requests one after another, and a burst
burst     what every target completes of requests that come all at once, in turns and mirrored
self      the first target against itself: the difference that chance alone makes
versus    every target in turn, at each rate
The last two in rounds. The order within a round is mirrored in the next (A B B A), so that a machine that grows slower
or faster hits all alike. Within a round and rate every target gets the same bytes at the same offsets, as far as their
tokenizers agree; between rounds the prompts differ, so that no window meets a cache that an earlier one has warmed. A
target has come to rest before the next one begins, and who takes processor time while idle is held still meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from inferloop.backends.http import HttpClient
from inferloop.bench.agenda import in_chains
from inferloop.bench.checks import self_checks
from inferloop.bench.codecs import HttpCodec
from inferloop.bench.compare_plan import LEAST_ROUNDS, Plan, choose_rates, drain_s, plan_windows
from inferloop.bench.compare_result import CompareResult, Side, SideWindow, Stage
from inferloop.bench.compare_side import Contender, Runner
from inferloop.bench.decide import FIRST_SHARE
from inferloop.bench.drive import DriveOptions
from inferloop.bench.fresh_cache import FreshCache
from inferloop.bench.host import OtherWork, busy_note, busy_percent, others_note
from inferloop.bench.render import RenderedRequest, RenderOptions
from inferloop.bench.target import describe_target
from inferloop.contract.arrivals import OPEN_PROCESSES
from inferloop.contract.sample import SampledWorkload, expected_starts_s, sample_workload
from inferloop.contract.workload import Contract
from inferloop.core.digest import plain
from inferloop.core.errors import RequestError, UsageError
from inferloop.measure.balance import balance_of
from inferloop.measure.timing import RequestTiming
from inferloop.records.run import RunWriter

__all__ = ["run_compare", "CompareOptions", "Contender", "Order", "Tell", "mirrored", "prompts_digest"]

Order = Callable[[int, int], Sequence[int]]
"""(number of targets, round from 0) to the order in which they are measured."""
Tell = Callable[[str, int, int, str | None], None]
"""(stage, windows done, windows in all, what just ended)."""
_OVERHEAD_S = 0.8
"""Of a window, besides its lead and its drain: making the bodies, connecting, coming to rest."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Without `rates` they are the contract's peak and what each target carries with ease: a share of what it completes
    of a burst. `window_s` is how long one window is measured, after a lead that is recorded but not measured, and
    `num_rounds` how often; what is None is chosen so that all fits `budget_s`, which begins with the first request.
    """

    rates: tuple[float, ...] = ()
    seed: int = 0
    num_rounds: int | None = None
    window_s: float | None = None
    budget_s: float | None = None
    num_warmup: int = 4
    num_burst: int = 32
    num_bursts: int = 2
    ignore_eos: bool = True
    request_timeout_s: float = 120.0
    fresh_cache: bool = True
    """Whether targets that can are kept from meeting in a window what their prefix caches hold from before it."""
    max_lead_s: float = 10.0
    rest_timeout_s: float = 30.0


def mirrored(count: int, number: int) -> Sequence[int]:
    """Forwards in even rounds, backwards in odd ones."""
    return range(count) if number % 2 == 0 else range(count - 1, -1, -1)


async def run_compare(
    contract: Contract,
    contenders: Sequence[Contender],
    options: CompareOptions,
    writer: RunWriter,
    tell: Tell | None = None,
    *,
    order: Order = mirrored,
) -> CompareResult:
    """Measure all contenders; the first is what the others are compared with.

    Every request goes to `writer` as it ends; `writer.finish` is the caller's. Raises UsageError for fewer than two
    contenders, no rate, or a budget that holds nothing, and what bench.search.run_bench raises for a target that cannot
    be measured.
    """
    if len(contenders) < 2:
        raise UsageError("a comparison needs at least two targets")
    if min(options.rates, default=1.0) <= 0 or (options.num_rounds or LEAST_ROUNDS) < LEAST_ROUNDS:
        raise UsageError("a comparison needs rates above 0 and two rounds")
    async with AsyncExitStack() as stack:
        runners: list[Runner] = []
        for number, contender in enumerate(contenders):
            client = HttpClient(contender.at)
            stack.push_async_callback(client.close)
            info = await describe_target(client, model=contender.model, launched=contender.launched)
            codec = contender.codec
            if codec is None:
                own = HttpCodec(info.endpoint, info.model)
                stack.callback(own.close)
                codec = own
            fresh = FreshCache(client, info.owner if options.fresh_cache else None)
            earlier = 0 if fresh.is_salted else sum(r.info.url == info.url for r in runners)
            label = chr(ord("A") + number)
            runners.append(Runner(label, contender, info, codec, fresh, earlier, options.rest_timeout_s))
        return await _Compare(contract, runners, options, writer, tell, order).run()


class _Compare:
    def __init__(
        self,
        contract: Contract,
        runners: Sequence[Runner],
        options: CompareOptions,
        writer: RunWriter,
        tell: Tell | None,
        order: Order,
    ) -> None:
        self._contract, self._runners, self._options = contract, runners, options
        self._writer, self._tell, self._order = writer, tell, order
        self._begin = time.monotonic()
        lengths = [r.info.context_length for r in runners if r.info.context_length is not None]
        self._context_limit = min(lengths, default=None)
        self._notes = [text for r in runners for text in r.info.endpoint.caveats]
        process = contract.traffic.arrivals.process
        self._arrivals = process if process in OPEN_PROCESSES else "poisson"
        if self._arrivals != process:
            self._notes.append(f"{process} arrivals set their own rate: a comparison at given rates takes poisson ones")
        self._windows: list[SideWindow] = []
        self._others = OtherWork([r.info.endpoint for r in runners])
        self._drain_s = self._lead_s = 0.0
        self._plan = Plan(0, {}, 0.0)

    async def run(self) -> CompareResult:
        o = self._options
        busy = busy_note(await busy_percent())
        if busy:
            self._notes.append(busy)
        path = await self._make_renderers()
        self._writer.update(
            target=", ".join(f"{r.label}: {r.contender.name}" for r in self._runners),
            identity=self._runners[0].info.identity,
            seed=o.seed,
            arrivals=self._arrivals,
            options={
                **self._writer.header.options,
                "compare": plain(o),
                "targets": [r.told() for r in self._runners],
            },
        )
        await self._make_ready()
        rates = o.rates or self._choose_rates()
        self._plan = plan = self._make_plan(rates)
        self._writer.update(
            warmup_s=self._lead_s,
            options={
                **self._writer.header.options,
                "chosen_rates": list(rates),
                "plan": {
                    "num_rounds": plan.num_rounds,
                    "windows_s": {f"{rate:g}": window_s for rate, window_s in plan.windows_s.items()},
                    "expected_s": plan.expected_s,
                },
                "targets": [r.told() for r in self._runners],
            },
        )
        await self._rounds()
        sides = tuple(Side(r.label, r.contender.name, r.told(), r.info.identity) for r in self._runners)
        self._notes += [text for r in self._runners for text in r.notes]
        self._note_prompts()
        self._notes += [
            f"the prefix cache of {r.label} was not emptied before each window: {r.fresh.problem}"
            for r in self._runners
            if r.fresh.problem is not None
        ]
        return CompareResult(self._contract.slo, sides, tuple(self._windows), rates, tuple(self._notes), path)

    async def _make_renderers(self) -> str:
        """The first of chats, texts and token ids in which every target can be given exact lengths."""
        base = RenderOptions("", ignore_eos=self._options.ignore_eos)
        problem = ""
        for way in (base, replace(base, as_chat=False), replace(base, as_token_ids=True)):
            try:
                for r in self._runners:
                    await asyncio.to_thread(r.make_renderer, way)
                return way.path
            except (RequestError, UsageError) as error:
                problem = str(error)
                self._notes.append(f"{way.path} is not used: {error}")
        raise UsageError(f"no prompts of exact lengths can be made for all targets: {problem}")

    async def _make_ready(self) -> None:
        """What engines do at their first requests, compiling for instance, is over when anything is measured; and who
        is idle takes no time from who is measured."""
        o = self._options
        for runner in self._runners:
            runner.learn(await self._aside("warmup", runner, o.num_warmup, num_chains=1))
            await self._aside("warmup", runner, o.num_burst, num_chains=None)
        for runner in self._runners:
            await runner.watch_idle()
        done = 0
        for number in range(o.num_bursts):
            for place in self._order(len(self._runners), number):
                runner = self._runners[place]
                qps = runner.learn_burst(await self._aside(f"burst/{number + 1}", runner, o.num_burst, num_chains=None))
                done += 1
                carried = "nothing" if qps is None else f"{qps:.3g} requests/s"
                self._say("burst", done, o.num_bursts * len(self._runners), f"{runner.label} completes {carried}")
        answer_s = max(r.answer_s for r in self._runners)
        # Long enough for the first requests to end on the slowest target; the same for all.
        self._lead_s = min(o.max_lead_s, max(0.2, 2 * answer_s))
        self._drain_s = drain_s(self._contract.slo, answer_s)

    async def _aside(self, stage: str, runner: Runner, count: int, *, num_chains: int | None) -> list[RequestTiming]:
        """Requests that are recorded but are in no window: one after another in so many chains, or all at once."""
        workload = sample_workload(
            self._contract, seed=self._options.seed, stream=f"compare/{stage}/{num_chains}", arrivals="burst",
            num_requests=count, context_limit=self._context_limit,
        )  # fmt: skip
        requests = workload.requests if num_chains is None else in_chains(workload.requests, num_chains)
        name = f"{stage}/{runner.label}"
        result = await runner.drive(
            await runner.render(requests, runner.salt, name),
            self._drive_options(self._options.request_timeout_s),
            lambda _, timing: self._writer.append(timing, point=name, warmup=True),
        )
        return list(result.timings)

    def _choose_rates(self) -> tuple[float, ...]:
        bursts = {r.label: r.burst_qps for r in self._runners if r.burst_qps is not None}
        if not bursts:
            raise UsageError("no target answered a request of a burst: give --rates")
        peak = self._contract.traffic.qps.peak
        told = ", ".join(f"{label} {qps:.3g}/s" for label, qps in bursts.items())
        self._notes.append(
            f"rates: the contract's peak, {peak:g}/s, and {FIRST_SHARE:.0%} of what each completes of a burst "
            f"({told}), as one where they lie close together"
        )
        return choose_rates(peak, {label: qps for label, qps in bursts.items() if qps is not None})

    def _make_plan(self, rates: Sequence[float]) -> Plan:
        o = self._options
        sides = [self._runners[0], self._runners[0], *self._runners]
        beside_s = {
            rate: sum(self._lead_s + _OVERHEAD_S + self._expected_drain_s(r, rate) for r in sides) for rate in rates
        }
        plan = plan_windows(
            rates, len(sides), beside_s, num_rounds=o.num_rounds, window_s=o.window_s, left_s=self._left_s()
        )
        self._notes += plan.notes
        lengths = ", ".join(f"{window_s:.3g} s at {rate:g}/s" for rate, window_s in plan.windows_s.items())
        total = plan.num_rounds * len(rates) * len(sides)
        self._say(
            "plan", 0, total, f"{plan.num_rounds} rounds, windows of {lengths}: about {plan.expected_s / 60:.1f} min"
        )
        return plan

    def _expected_drain_s(self, runner: Runner, rate: float) -> float:
        carried = runner.burst_qps
        return self._drain_s if carried is not None and rate > FIRST_SHARE * carried * 1.2 else runner.answer_s

    async def _rounds(self) -> None:
        """Both stages in every round, so that whenever it ends chance is as well known as the differences are."""
        first = self._runners[0]
        stages: tuple[tuple[Stage, list[tuple[Runner, int]]], ...] = (
            ("self", [(first, 0), (first, 0 if first.fresh.is_salted else 1)]),
            ("versus", [(r, r.salt) for r in self._runners]),
        )
        plan = self._plan
        total = plan.num_rounds * len(plan.windows_s) * sum(len(sides) for _, sides in stages)
        longest_s = 0.0
        for number in range(plan.num_rounds):
            begin, left_s = time.monotonic(), self._left_s()
            if left_s is not None and number >= LEAST_ROUNDS and longest_s > left_s:
                self._notes.append(f"the budget ended after {number} of {plan.num_rounds} rounds")
                break
            for stage, sides in stages:
                await self._round(stage, sides, number, total)
            longest_s = max(longest_s, time.monotonic() - begin)

    async def _round(self, stage: Stage, sides: Sequence[tuple[Runner, int]], number: int, total: int) -> None:
        for rate, window_s in self._plan.windows_s.items():
            stream = f"compare/{stage}/{rate:g}/{number}"
            workload = sample_workload(
                self._contract, seed=self._options.seed, stream=stream, arrivals=self._arrivals, qps=rate,
                duration_s=self._lead_s + window_s, context_limit=self._context_limit,
            )  # fmt: skip
            for place in self._order(len(sides), number):
                runner, salt = sides[place]
                label = runner.label if stage == "versus" else f"{runner.label}{place + 1}"
                window = await self._window(stage, label, runner, salt, workload, rate, number)
                self._windows.append(window)
                self._say(stage, len(self._windows), total, window.text)

    async def _window(
        self,
        stage: Stage,
        label: str,
        runner: Runner,
        salt: int,
        workload: SampledWorkload,
        rate: float,
        number: int,
    ) -> SideWindow:
        name = f"{stage}/{label}/{rate:g}/{number + 1}"
        planned = await runner.render(workload.requests, salt, name)
        num_lead = sum(s < self._lead_s for s in expected_starts_s(workload.requests))
        measured: dict[int, RequestTiming] = {}

        def keep(index: int, timing: RequestTiming) -> None:
            self._writer.append(timing, point=name, warmup=index < num_lead)
            if index >= num_lead:
                measured[index] = timing

        await asyncio.to_thread(self._others.begin)
        with self._writer.stage(name, num_requests=len(planned)):
            result = await runner.drive(planned, self._drive_options(self._drain_s), keep)
        others = others_note(await asyncio.to_thread(self._others.percent))
        timings = [measured[i] for i in sorted(measured)]
        checks = self_checks(
            *(result, timings, planned, self._contract.slo, workload.prefix_reuse),
            is_compared=True,
            exact_lengths=self._options.ignore_eos,
        )
        void = checks.void if timings else (*checks.void, "no request was due in the window")
        notes = (*checks.notes, others) if others else checks.notes
        prompts, balance = prompts_digest(planned), balance_of(result.timings)
        return SideWindow(
            *(stage, label, rate, number, measured, void, notes, prompts, name, balance), reuse=checks.reuse
        )

    def _left_s(self) -> float | None:
        budget_s = self._options.budget_s
        return None if budget_s is None else budget_s - (time.monotonic() - self._begin)

    def _say(self, stage: str, num_done: int, num_total: int, text: str) -> None:
        if self._tell is not None:
            self._tell(stage, num_done, num_total, text)

    def _drive_options(self, cut_off_s: float) -> DriveOptions:
        return DriveOptions(request_timeout_s=self._options.request_timeout_s, cut_off_s=cut_off_s)

    def _note_prompts(self) -> None:
        by_label: dict[str, list[str]] = {}
        for w in self._windows:
            if w.stage == "versus":
                by_label.setdefault(w.label, []).append(w.prompts)
        first = by_label[self._runners[0].label]
        for runner in self._runners[1:]:
            if sorted(by_label[runner.label]) == sorted(first):
                continue
            why = (
                "the same server stands twice, and must not meet its own cache" if runner.salt else "tokenizers differ"
            )
            self._notes.append(
                f"{runner.label} got requests of the same lengths and shared beginnings, in other words: {why}"
            )


def prompts_digest(planned: Sequence[RenderedRequest]) -> str:
    """Of all bodies but for what engines differ in: the model's name, what cache they may meet, and how they are told
    to go past end tokens."""
    digest = hashlib.sha256()
    for request in planned:
        body: dict[str, Any] = msgspec.json.decode(request.body)
        for name in ("model", "cache_salt", "logit_bias"):  # the last is how one engine is told to ignore end tokens
            body.pop(name, None)
        digest.update(msgspec.json.encode(body) + b"\0")
    return digest.hexdigest()

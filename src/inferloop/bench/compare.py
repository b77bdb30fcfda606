"""The course of a comparison: the same frozen requests on several targets, in turns.

self      the first target against itself: the difference that chance alone makes, found before anything is compared
versus    every target in turn, at each rate, in rounds
The order within a round is mirrored in the next (A B B A), so that a machine that grows slower or faster hits all
alike. Within a round and rate every target gets the same bytes at the same offsets, as far as their tokenizers agree;
between rounds the prompts differ, so that no window meets a cache that an earlier one has warmed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from inferloop.backends.http import HttpClient
from inferloop.bench.agenda import in_chains
from inferloop.bench.checks import self_checks
from inferloop.bench.codecs import HttpCodec
from inferloop.bench.compare_result import CompareResult, Side, SideWindow, Stage
from inferloop.bench.decide import FIRST_SHARE, on_grid
from inferloop.bench.drive import DriveOptions, Endpoint, drive
from inferloop.bench.fresh_cache import FreshCache
from inferloop.bench.host import OtherWork, busy_note, busy_percent, others_note
from inferloop.bench.render import PromptCodec, RenderedRequest, Renderer, RenderOptions
from inferloop.bench.target import Launched, TargetInfo, describe_target
from inferloop.contract.arrivals import OPEN_PROCESSES
from inferloop.contract.draws import seed_of
from inferloop.contract.sample import SampledWorkload, expected_starts_s, sample_workload
from inferloop.contract.workload import Contract
from inferloop.core.digest import plain
from inferloop.core.errors import RequestError, UsageError
from inferloop.core.request import TimedRequest
from inferloop.core.units import NS_PER_S
from inferloop.measure.timing import RequestTiming
from inferloop.records.run import RunWriter

Order = Callable[[int, int], Sequence[int]]
"""(number of targets, round from 0) to the order in which they are measured."""
Tell = Callable[[str, int, int, str | None], None]
"""(stage, windows done, windows in all, what just ended)."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A target that is up. `name` is what the user called it, `flags` what it was started with."""

    name: str
    at: Endpoint | str
    model: str | None = None
    codec: PromptCodec | None = None
    flags: tuple[str, ...] = ()
    launched: Launched | None = None


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """`window_s` is how long one window is measured, after a lead that is recorded but not measured. Without `rates`
    they are the contract's peak and what the first target carries with ease: a share of what it completes of a burst.
    """

    rates: tuple[float, ...] = ()
    seed: int = 0
    num_rounds: int = 4
    window_s: float = 10.0
    num_warmup: int = 4
    num_burst: int = 32
    ignore_eos: bool = True
    request_timeout_s: float = 120.0
    fresh_cache: bool = True
    """Whether targets that can are kept from meeting in a window what their prefix caches hold from before it."""
    max_lead_s: float = 10.0
    max_drain_s: float = 30.0


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
    contenders or no rate, and what bench.search.run_bench raises for a target that cannot be measured.
    """
    if len(contenders) < 2:
        raise UsageError("a comparison needs at least two targets")
    if min(options.rates, default=1.0) <= 0 or options.num_rounds < 2:
        raise UsageError("a comparison needs rates above 0 and two rounds")
    async with AsyncExitStack() as stack:
        runners: list[_Runner] = []
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
            runners.append(_Runner(chr(ord("A") + number), contender, info, codec, fresh, earlier))
        return await _Compare(contract, runners, options, writer, tell, order).run()


@dataclass
class _Runner:
    label: str
    contender: Contender
    info: TargetInfo
    codec: PromptCodec
    fresh: FreshCache
    salt: int
    """How often the same URL stands before it: it must not meet the prompts that those have left in its cache. 0 where
    a cache salt sees to that."""
    renderer: Renderer | None = None


class _Compare:
    def __init__(
        self,
        contract: Contract,
        runners: Sequence[_Runner],
        options: CompareOptions,
        writer: RunWriter,
        tell: Tell | None,
        order: Order,
    ) -> None:
        self._contract, self._runners, self._options = contract, runners, options
        self._writer, self._tell, self._order = writer, tell, order
        lengths = [r.info.context_length for r in runners if r.info.context_length is not None]
        self._context_limit = min(lengths, default=None)
        self._notes = [text for r in runners for text in r.info.endpoint.caveats]
        process = contract.traffic.arrivals.process
        self._arrivals = process if process in OPEN_PROCESSES else "poisson"
        if self._arrivals != process:
            self._notes.append(f"{process} arrivals set their own rate: a comparison at given rates takes poisson ones")
        self._windows: list[SideWindow] = []
        self._answer_s = 0.0
        self._others = OtherWork([r.info.endpoint for r in runners])
        self._rates = options.rates

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
            window_s=o.window_s,
            options={**self._writer.header.options, "compare": plain(o), "targets": [_told(r) for r in self._runners]},
        )
        for runner in self._runners:
            await self._warm_up(runner)
        first = self._runners[0]
        if not self._rates:
            self._rates = await self._choose_rates(first)
            self._writer.update(options={**self._writer.header.options, "chosen_rates": list(self._rates)})
        twins = [(first, 0), (first, 0 if first.fresh.is_salted else 1)]
        await self._rounds("self", twins)
        await self._rounds("versus", [(r, r.salt) for r in self._runners])
        self._writer.update(warmup_s=self._lead_s())
        sides = tuple(Side(r.label, r.contender.name, _told(r), r.info.identity) for r in self._runners)
        self._note_prompts()
        self._notes += [
            f"the prefix cache of {r.label} was not emptied before each window: {r.fresh.problem}"
            for r in self._runners
            if r.fresh.problem is not None
        ]
        return CompareResult(self._contract.slo, sides, tuple(self._windows), self._rates, tuple(self._notes), path)

    async def _make_renderers(self) -> str:
        """The first of chats, texts and token ids in which every target can be given exact lengths."""
        base = RenderOptions("", ignore_eos=self._options.ignore_eos)
        problem = ""
        for way in (base, replace(base, as_chat=False), replace(base, as_token_ids=True)):
            try:
                for r in self._runners:
                    exact = r.contender.launched.exact_length if r.contender.launched and way.ignore_eos else {}
                    own = replace(way, model=r.info.model, extra=exact)
                    r.renderer = await asyncio.to_thread(Renderer, r.codec, own)
                return way.path
            except (RequestError, UsageError) as error:
                problem = str(error)
                self._notes.append(f"{way.path} is not used: {error}")
        raise UsageError(f"no prompts of exact lengths can be made for all targets: {problem}")

    async def _warm_up(self, runner: _Runner) -> None:
        for t in await self._aside("warmup", runner, self._options.num_warmup, num_chains=1):
            if t.ok:
                self._answer_s = max(self._answer_s, (t.t_end_ns - t.t_send_ns) / NS_PER_S)

    async def _choose_rates(self, first: _Runner) -> tuple[float, ...]:
        """The contract's peak, and a rate that keeps the first target busy without filling it."""
        timings = await self._aside("burst", first, self._options.num_burst, num_chains=None)
        num_ok = sum(t.ok for t in timings)
        if not num_ok:
            raise UsageError(f"{first.contender.name} answered no request of a burst: give --rates")
        span_ns = max(t.t_end_ns for t in timings) - min(t.t_send_ns for t in timings)
        carried = FIRST_SHARE * num_ok * NS_PER_S / max(1, span_ns)
        peak = self._contract.traffic.qps.peak
        self._notes.append(
            f"rates: the contract's peak, {peak:g}/s, and {FIRST_SHARE:.0%} of what {first.label} completes of a burst"
        )
        return tuple(sorted({peak, on_grid(carried)}))

    async def _aside(self, stage: str, runner: _Runner, count: int, *, num_chains: int | None) -> list[RequestTiming]:
        """Requests that are recorded and compared with nothing: one after another in so many chains, or all at once."""
        workload = sample_workload(
            self._contract, seed=self._options.seed, stream=f"compare/{stage}", arrivals="burst",
            num_requests=count, context_limit=self._context_limit,
        )  # fmt: skip
        requests = workload.requests if num_chains is None else in_chains(workload.requests, num_chains)
        name = f"{stage}/{runner.label}"
        planned = await self._render(runner, requests, runner.salt, name)
        await runner.fresh.empty()
        result = await drive(
            planned,
            runner.info.endpoint,
            self._drive_options(),
            on_done=lambda _, timing: self._writer.append(timing, point=name, warmup=True),
        )
        return list(result.timings)

    async def _rounds(self, stage: Stage, sides: Sequence[tuple[_Runner, int]]) -> None:
        o = self._options
        total = len(sides) * len(self._rates) * o.num_rounds
        done = 0
        for number in range(o.num_rounds):
            for rate in self._rates:
                stream = f"compare/{stage}/{rate:g}/{number}"
                workload = sample_workload(
                    self._contract, seed=o.seed, stream=stream, arrivals=self._arrivals, qps=rate,
                    duration_s=self._lead_s() + o.window_s, context_limit=self._context_limit,
                )  # fmt: skip
                for place in self._order(len(sides), number):
                    runner, salt = sides[place]
                    label = runner.label if stage == "versus" else f"{runner.label}{place + 1}"
                    window = await self._window(stage, label, runner, salt, workload, rate, number)
                    self._windows.append(window)
                    done += 1
                    if self._tell is not None:
                        self._tell(stage, done, total, window.text)

    async def _window(
        self,
        stage: Stage,
        label: str,
        runner: _Runner,
        salt: int,
        workload: SampledWorkload,
        rate: float,
        number: int,
    ) -> SideWindow:
        name = f"{stage}/{label}/{rate:g}/{number + 1}"
        planned = await self._render(runner, workload.requests, salt, name)
        num_lead = sum(s < self._lead_s() for s in expected_starts_s(workload.requests))
        measured: dict[int, RequestTiming] = {}

        def keep(index: int, timing: RequestTiming) -> None:
            self._writer.append(timing, point=name, warmup=index < num_lead)
            if index >= num_lead:
                measured[index] = timing

        await runner.fresh.empty()
        await asyncio.to_thread(self._others.begin)
        with self._writer.stage(name, num_requests=len(planned)):
            result = await drive(planned, runner.info.endpoint, self._drive_options(), on_done=keep)
        others = others_note(await asyncio.to_thread(self._others.percent))
        timings = [measured[i] for i in sorted(measured)]
        # What a target makes of its cache is part of what is compared.
        checks = self_checks(result, timings, planned, self._contract.slo, workload.prefix_reuse, cold_voids=False)
        void = checks.void if timings else (*checks.void, "no request was measured")
        notes = (*checks.notes, others) if others else checks.notes
        return SideWindow(stage, label, rate, number, measured, void, notes, prompts_digest(planned), name)

    async def _render(
        self, runner: _Runner, requests: Sequence[TimedRequest], salt: int, part: str
    ) -> tuple[RenderedRequest, ...]:
        assert runner.renderer is not None
        return await asyncio.to_thread(runner.renderer.render, salted(requests, salt), runner.fresh.fields(part))

    def _lead_s(self) -> float:
        """Long enough for the first requests to end on the slowest target; the same for all."""
        return min(self._options.max_lead_s, max(0.2, 2 * self._answer_s))

    def _drive_options(self) -> DriveOptions:
        return DriveOptions(request_timeout_s=self._options.request_timeout_s, cut_off_s=self._options.max_drain_s)

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


def salted(requests: Sequence[TimedRequest], salt: int) -> Sequence[TimedRequest]:
    """The same requests in other words; salt 0 leaves them as they are."""
    if not salt:
        return requests
    return [
        replace(r, segments=tuple(replace(s, key=seed_of(s.key, "again", salt)) for s in r.segments)) for r in requests
    ]


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


def _told(runner: _Runner) -> dict[str, Any]:
    """What is stated of a target."""
    return {
        "label": runner.label,
        "name": runner.contender.name,
        "url": runner.info.url,
        "model": runner.info.model,
        "flags": list(runner.contender.flags),
        "launched": plain(runner.contender.launched.told) if runner.contender.launched else None,
        "context_length": runner.info.context_length,
        "fresh_cache": runner.fresh.way,
    }

"""A whole engine on a clock that its steps move: what requests see when a step takes a known time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from inferloop.core.clock import VirtualClock
from inferloop.core.ids import TraceContext
from inferloop.core.request import BATCH_PRIORITY, Sampling, TokenRequest
from inferloop.core.units import NS_PER_MS
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.compute.runner import GiveUp, never
from inferloop.engine.config import EngineConfig
from inferloop.engine.loop import Engine
from inferloop.engine.roster import TokenUpdate
from inferloop.engine.schedule.pace import MIN_PREFILL_TOKENS, StepTime
from inferloop.engine.schedule.pacer import num_decoding
from inferloop.engine.schedule.step import StepPlan, StepResult

Cost = Callable[[int, int], float]
"""Milliseconds of a step, by tokens to prefill and rows that decode."""


class CostRunner(EchoRunner):
    """A step takes what `cost` says, and gives everybody the same token. With `next_ms`, which says when somebody comes
    next, steps that may be given up are given up then."""

    def __init__(self, clock: VirtualClock, cost: Cost, next_ms: Callable[[], float] | None = None) -> None:
        super().__init__(context_length=4096, num_blocks=8192, block_size=16)
        self._info = replace(self._info, can_give_up=next_ms is not None)
        self.clock, self.cost, self.cost_ms, self.next_ms = clock, cost, 0.0, next_ms
        self.given_up_ms = 0.0
        self.come = GiveUp()
        self.come.set()

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        num_decodes = num_decoding(plan)
        self.cost_ms = self.cost(plan.num_tokens - num_decodes, num_decodes)
        left_ms = (
            self.next_ms() - self.clock.now_ns() / NS_PER_MS if self.next_ms and give_up is not never else math.inf
        )
        if left_ms < self.cost_ms:
            self.cost_ms = max(0.0, left_ms)
            self.given_up_ms += self.cost_ms
        super().submit(plan, self.come if left_ms <= self.cost_ms else never)

    def wait(self) -> StepResult:
        self.clock.advance(round(self.cost_ms * NS_PER_MS))
        return super().wait()

    def _sample(self, plan: StepPlan, i: int, tokens: list[int]) -> list[int]:
        return [1]


@dataclass(frozen=True)
class Call:
    name: str
    at_ms: float
    num_prompt: int
    max_tokens: int
    priority: int = 0


@dataclass
class Seen:
    """What became of each call: when its tokens came, and how it ended."""

    at_ms: dict[str, list[float]] = field(default_factory=dict)
    end: dict[str, str] = field(default_factory=dict)
    given_up_ms: float = 0.0

    def __call__(self, updates: Sequence[TokenUpdate]) -> None:
        for update in updates:
            if update.token_ids:
                self.at_ms.setdefault(update.request_id, []).append(update.t_ns / NS_PER_MS)
            if update.finish_reason is not None:
                self.end[update.request_id] = update.finish_reason

    def longest_gap_ms(self, name: str) -> float:
        return max(b - a for a, b in itertools.pairwise(self.at_ms[name]))


def play(calls: Iterable[Call], cost: Cost, *, gives_up: bool = False, **options: float | None) -> Seen:
    """The engine's own loop, one step after the other, on this thread."""
    clock, seen = VirtualClock(), Seen()
    config = EngineConfig(max_step_tokens=512, share_prefixes=False, max_waiting_tokens=1 << 30, **options)  # type: ignore[arg-type]
    pending = sorted(calls, key=lambda call: call.at_ms, reverse=True)

    def next_ms() -> float:
        return next((call.at_ms for call in reversed(pending) if call.priority < BATCH_PRIORITY), math.inf)

    runner = CostRunner(clock, cost, next_ms if gives_up else None)
    engine = Engine(runner, config, clock, seen)
    while pending or engine._roster:
        if not engine._roster:
            clock.advance(max(0, round(pending[-1].at_ms * NS_PER_MS) - clock.now_ns()))
        while pending and round(pending[-1].at_ms * NS_PER_MS) <= clock.now_ns():
            call = pending.pop()
            prompt = tuple((len(call.name) + i) % 97 for i in range(call.num_prompt))
            engine.submit(
                TokenRequest(
                    call.name,
                    prompt,
                    Sampling(max_tokens=call.max_tokens),
                    TraceContext.new(),
                    round(call.at_ms * NS_PER_MS),
                    priority=call.priority,
                )
            )
        engine._drain_doors()
        engine._step()
    assert engine.stats().num_running == engine.stats().num_waiting == engine.stats().queue_tokens == 0
    seen.given_up_ms = runner.given_up_ms
    return seen


@pytest.mark.parametrize(
    ("cost", "objective_ms"),
    [
        (StepTime(12.0, 1.5, 0.9).predict, 100.0),
        (StepTime(5.0, 0.02, 0.01).predict, 20.0),
        (StepTime(200.0, 30.0, 25.0).predict, 1500.0),
        (StepTime(10.0, 1.0, 0.5).predict, 42.0),
        (StepTime(0.0, 1.0, 0.5).predict, 40.0),
        (lambda num_prefill, num_decodes: 10 + 0.5 * num_decodes + 0.1 * num_prefill + 4e-4 * num_prefill**2, 60.0),
    ],
)
def test_long_prompts_and_background_work_leave_running_answers_their_time(cost: Cost, objective_ms: float) -> None:
    unit_ms = cost(0, 1)
    assert cost(2 * MIN_PREFILL_TOKENS, 14) < objective_ms, "the least that a step prefills leaves room"
    running = [Call(f"answer {i}", 0.0, 20, 400) for i in range(8)]
    prompts = [Call(f"prompt {i}", unit_ms * (5 + 40 * i), 2000, 50) for i in range(6)]
    jobs = [Call(f"job {i}", unit_ms * 20 * i, 300, 50, BATCH_PRIORITY) for i in range(3)]
    seen = play([*running, *prompts, *jobs], cost, tpot_objective_ms=objective_ms)
    assert set(seen.end.values()) == {"length"}
    assert max(seen.longest_gap_ms(call.name) for call in [*running, *prompts]) <= objective_ms
    free = play([*running, *prompts, *jobs], cost)
    if cost(512, 8) > objective_ms:
        assert max(free.longest_gap_ms(call.name) for call in running) > objective_ms, "the objective was for nothing"


def test_steps_that_vary_rarely_miss_the_objective() -> None:
    rng, truth = random.Random(1), StepTime(12.0, 1.5, 0.9)

    def cost(num_prefill: int, num_decodes: int) -> float:
        return truth.predict(num_prefill, num_decodes) * rng.lognormvariate(0, 0.05)

    running = [Call(f"answer {i}", 0.0, 20, 400) for i in range(8)]
    prompts = [Call(f"prompt {i}", 1000.0 + 2000 * i, 2000, 50) for i in range(6)]
    seen = play([*running, *prompts], cost, tpot_objective_ms=100.0)
    gaps = sorted(b - a for call in running for a, b in itertools.pairwise(seen.at_ms[call.name]))
    assert sum(gap > 100.0 for gap in gaps) / len(gaps) < 0.15
    assert gaps[-1] < 125.0
    assert sum(gap > 75.0 for gap in gaps) > 100, "and makes use of it"


@pytest.mark.parametrize("stalled_ms", [0.0, 30_000.0])
def test_a_wrong_estimate_gives_nobody_up_for_long(stalled_ms: float) -> None:
    """Neither what is assumed before the first step, nor a stall in the first ones, may keep out everybody: no step
    would ever correct it."""
    truth, num_steps = StepTime(1.0, 0.01, 0.002), itertools.count()

    def cost(num_prefill: int, num_decodes: int) -> float:
        return stalled_ms if stalled_ms and next(num_steps) < 3 else truth.predict(num_prefill, num_decodes)

    calls = [Call(f"call {i}", 400.0 * i, 4000, 20) for i in range(int(3 * stalled_ms / 400) + 20)]
    seen = play(calls, cost, max_ttft_ms=500.0)
    given_up = [call for call in calls if seen.end[call.name] == "shed"]
    assert len(given_up) <= 3 * stalled_ms / 400 + 1
    assert all(call.at_ms < 3 * stalled_ms + 400 for call in given_up)


def test_only_the_late_are_given_up_under_overload() -> None:
    rng, at_ms, calls = random.Random(5), 0.0, []
    for i in range(150):
        at_ms += rng.expovariate(8 / 1000)
        calls.append(Call(f"call {i}", at_ms, rng.choice([100, 300, 1000, 3000]), rng.randint(20, 200)))
    cost = StepTime(10.0, 0.5, 0.1).predict
    free, seen = play(calls, cost), play(calls, cost, max_ttft_ms=1000.0)

    def num_in_time(of: Seen) -> int:
        return sum(of.at_ms[c.name][0] - c.at_ms <= 1000.0 for c in calls if c.name in of.at_ms)

    assert num_in_time(seen) > 2 * num_in_time(free)
    assert len(seen.at_ms) - num_in_time(seen) <= 5, "who is let in is in time"
    quiet = [Call(c.name, c.at_ms * 8, c.num_prompt, c.max_tokens) for c in calls]
    assert "shed" not in play(quiet, cost, max_ttft_ms=1000.0).end.values()


@pytest.mark.parametrize("gap_ms", [150.0, 400.0, 2000.0])
def test_background_work_gets_on_however_often_somebody_comes(gap_ms: float) -> None:
    """A whole step of it takes longer than the time between two calls, and would be given up each time."""
    cost = StepTime(20.0, 1.0, 2.0).predict
    calls = [Call(f"call {i}", (gap_ms + 50.0) * i, 5, 2) for i in range(round(20_000 / gap_ms))]
    job = Call("job", 1.0, 2000, 50, BATCH_PRIORITY)
    alone_ms = play([job], cost).at_ms["job"][-1]
    seen = play([*calls, job], cost, gives_up=True)
    end_ms = seen.at_ms["job"][-1]
    assert end_ms < 4 * alone_ms, "well before the calls end"
    assert seen.given_up_ms < 0.3 * end_ms
    assert max(seen.at_ms[call.name][0] - call.at_ms for call in calls) <= cost(MIN_PREFILL_TOKENS, 1)

"""The search against a queue whose capacity is known: M/M/1, where 95 % of answers come within ln(20) / (mu - rate).

Each level is a simulation with the noise and the correlation of a real queue, judged by the code that judges real ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from inferloop.bench.decide import Done, Limits, Step, next_step
from inferloop.core.slo import Objective, Slo
from inferloop.core.units import NS_PER_S
from inferloop.measure.frontier import Frontier, FrontierPoint
from inferloop.measure.margin import margin_interval
from inferloop.measure.summary import arrival_rate
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.measure.verdict import judge

FLOOR = 143
LEAD_S = 2.0


@dataclass
class Queue:
    """One server, first come first served, `mu` answers per second; 95 % have to begin within `limit_s`."""

    mu: float
    limit_s: float
    rng: np.random.Generator

    @property
    def capacity(self) -> float:
        return self.mu - math.log(20) / self.limit_s

    @property
    def slo(self) -> Slo:
        return Slo((Objective("ttft_ms", 0.95, self.limit_s * 1000),))

    def measure(self, step: Step) -> FrontierPoint:
        num_lead = round(step.qps * LEAD_S)
        count = step.num_requests + num_lead
        due = np.cumsum(self.rng.exponential(1 / step.qps, count))
        work = self.rng.exponential(1 / self.mu, count)
        free, timings = 0.0, []
        for i in range(count):
            free = max(free, due[i]) + work[i]
            t, end = round(due[i] * NS_PER_S), round(free * NS_PER_S)
            timings.append(RequestTiming(str(i), t, t, None, end, (Chunk(end, 1),), 1, 1))
        measured = timings[num_lead:]
        slo, margin = judge(self.slo, measured), margin_interval(self.slo, measured)
        assert margin is not None
        arrived = arrival_rate(measured) or step.qps
        return FrontierPoint(
            *(min(step.qps, arrived), None, None, slo.verdict, margin.margin, margin.low, margin.high),
            arrival_qps=arrived,
            is_scout=step.role == "scout",
        )


def search(queue: Queue, *, budget_s: float = 170.0, num_points: int = 7) -> tuple[Frontier, list[Step], Done]:
    limits = Limits(queue.mu / 3, queue.mu, 0.7 * queue.mu, num_points, FLOOR, LEAD_S + 1.0, budget_s)
    found: list[FrontierPoint] = []
    steps: list[Step] = []
    left_s = budget_s
    idle = 1 - math.log(20) / queue.mu / queue.limit_s
    while isinstance(step := next_step(Frontier.of(found, idle), len(found), left_s, limits), Step):
        found.append(queue.measure(step))
        steps.append(step)
        left_s -= step.num_requests / step.qps + limits.overhead_s
    assert left_s > -0.05 * budget_s
    return Frontier.of(found, idle), steps, step


def queue(seed: int) -> Queue:
    rng = np.random.default_rng(seed)
    mu = float(np.exp(rng.uniform(math.log(4), math.log(40))))
    share = rng.uniform(0.4, 0.75)
    return Queue(mu, math.log(20) / (mu * (1 - share)), rng)


def test_the_interval_holds_the_capacity() -> None:
    runs = [(q := queue(seed), search(q)[0].crossing()) for seed in range(60)]
    told = [(q, found) for q, found in runs if found is not None]
    assert len(told) >= 55
    inside = sum(found.low <= q.capacity <= found.high for q, found in told)
    assert inside >= 0.9 * len(told), f"{inside} of {len(told)}"
    errors = sorted(abs(found.qps / q.capacity - 1) for q, found in told)
    assert errors[len(errors) // 2] <= 0.15

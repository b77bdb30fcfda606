"""Servers whose capacity is known, as the search meets them: each level is a simulation with the noise and the
correlation of a real queue, judged by the code that judges real ones."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np

from inferloop.bench.decide import LEAD_SHARE, Done, Limits, Step, next_step
from inferloop.core.slo import Objective, Slo
from inferloop.core.units import NS_PER_S
from inferloop.measure.balance import balance_of
from inferloop.measure.columns import CENSORED
from inferloop.measure.frontier import Frontier, FrontierPoint
from inferloop.measure.margin import margin_interval
from inferloop.measure.quantiles import quantile
from inferloop.measure.summary import arrival_rate
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.measure.verdict import hopeless, judge

FLOOR = 143


class Server(Protocol):
    """`answer_s`: alone; `top_qps`: the most it completes."""

    @property
    def answer_s(self) -> float: ...
    @property
    def top_qps(self) -> float: ...
    @property
    def capacity(self) -> float: ...
    @property
    def slo(self) -> Slo: ...
    @property
    def idle_margin(self) -> float: ...

    def answer(self, due_s: np.ndarray, rng: np.random.Generator) -> list[tuple[float, float]]:
        """(first token, end) of each request."""
        ...


@dataclass(frozen=True)
class Queue:
    """M/M/1: one at a time, first come first served, `mu` answers per second; 95 % have to begin within `limit_s`. In
    equilibrium 95 % of answers come within ln(20) / (mu - rate). `drift`: see Batching."""

    mu: float
    limit_s: float
    drift: float = 0.0

    @property
    def answer_s(self) -> float:
        return 1 / self.mu

    @property
    def top_qps(self) -> float:
        return self.mu

    @property
    def capacity(self) -> float:
        return self.mu - math.log(20) / self.limit_s

    @property
    def slo(self) -> Slo:
        return Slo((Objective("ttft_ms", 0.95, self.limit_s * 1000),))

    @property
    def idle_margin(self) -> float:
        return 1 - math.log(20) / self.mu / self.limit_s

    def answer(self, due_s: np.ndarray, rng: np.random.Generator) -> list[tuple[float, float]]:
        return _one_at_a_time(due_s, rng.exponential(1 / self.mu / _speed(self.drift, rng), len(due_s)))


@dataclass(frozen=True)
class Regular:
    """M/D/1: one at a time, `mu` answers per second that all take as long; 95 % have to come within `limit_answers`
    times that long."""

    mu: float
    limit_answers: float

    @property
    def answer_s(self) -> float:
        return 1 / self.mu

    @property
    def top_qps(self) -> float:
        return self.mu

    @property
    def slo(self) -> Slo:
        return Slo((Objective("ttft_ms", 0.95, 1000 * self.limit_answers / self.mu),))

    @property
    def idle_margin(self) -> float:
        return 1 - 1 / self.limit_answers

    @property
    def capacity(self) -> float:
        return _share_of_regular(self.limit_answers) * self.mu

    def answer(self, due_s: np.ndarray, rng: np.random.Generator) -> list[tuple[float, float]]:
        return _one_at_a_time(due_s, np.full(len(due_s), 1 / self.mu))


def _one_at_a_time(due_s: np.ndarray, works_s: np.ndarray) -> list[tuple[float, float]]:
    free, ends = 0.0, []
    for due, work in zip(due_s.tolist(), works_s.tolist(), strict=True):
        free = max(free, due) + work
        ends.append((free, free))
    return ends


@lru_cache(maxsize=32)
def _share_of_regular(limit_answers: float) -> float:
    low, high = 0.05, 1.0
    for _ in range(9):
        share = (low + high) / 2
        rng = np.random.default_rng(0)
        due = np.cumsum(rng.exponential(1 / share, 200_000))
        ends = np.array(_one_at_a_time(due, np.ones(len(due))))[:, 1]
        low, high = (share, high) if quantile(np.sort(ends - due), 0.95) <= limit_answers else (low, share)
    return (low + high) / 2


def _speed(drift: float, rng: np.random.Generator) -> float:
    return float(np.exp(rng.normal(-(drift**2) / 2, drift))) if drift else 1.0


@dataclass(frozen=True)
class Batching:
    """Continuous batching: up to `slots` requests get a token each per step, which takes `step_s * (1 + load * active)`
    and `prefill` steps more per request that begins. So latency is low until all slots are taken, and then what is
    completed does not grow. `drift`: the machine's speed differs from level to level, with that standard deviation."""

    slots: int
    step_s: float
    load: float = 0.05
    prefill: float = 0.2
    mean_tokens: float = 16.0
    limit_answers: float = 3.0
    """The limit of TTFT, as a multiple of the time of an answer beside full slots."""
    drift: float = 0.0

    @property
    def _full_step_s(self) -> float:
        return self.step_s * (1 + self.load * self.slots + self.prefill * self.slots / self.mean_tokens)

    @property
    def answer_s(self) -> float:
        return self.mean_tokens * self.step_s * (1 + self.load)

    @property
    def top_qps(self) -> float:
        return self.slots / self.mean_tokens / self._full_step_s

    @property
    def slo(self) -> Slo:
        return Slo((Objective("ttft_ms", 0.95, 1000 * self.limit_answers * self.mean_tokens * self._full_step_s),))

    @property
    def idle_margin(self) -> float:
        return 1 - 1000 * self.step_s * (1 + self.load + self.prefill) / self.slo.objectives[0].limit

    @property
    def capacity(self) -> float:
        """By a simulation that is as long as it takes; in units of the step, so that one serves all speeds."""
        return _share_of_top(self.slots, self.load, self.prefill, self.mean_tokens, self.limit_answers) * self.top_qps

    def answer(self, due_s: np.ndarray, rng: np.random.Generator) -> list[tuple[float, float]]:
        step_s = self.step_s / _speed(self.drift, rng)
        sigma = 0.6  # half of the answers within a factor of 1.5 of the median
        tokens = np.maximum(2, rng.lognormal(math.log(self.mean_tokens) - sigma**2 / 2, sigma, len(due_s)).round())
        due = due_s.tolist()
        waiting: deque[int] = deque()
        active: list[tuple[int, int]] = []  # (step in which it ends, request)
        first, end = [0.0] * len(due), [0.0] * len(due)
        now, k, i = 0.0, 0, 0
        while i < len(due) or waiting or active:
            if not active and not waiting and due[i] > now:
                now = due[i]
            while i < len(due) and due[i] <= now:
                waiting.append(i)
                i += 1
            begin = []
            while waiting and len(active) < self.slots:
                r = waiting.popleft()
                heapq.heappush(active, (k + int(tokens[r]) - 1, r))
                begin.append(r)
            now += step_s * (1 + self.load * len(active) + self.prefill * len(begin))
            for r in begin:
                first[r] = now
            while active and active[0][0] <= k:
                end[heapq.heappop(active)[1]] = now
            k += 1
        return list(zip(first, end, strict=True))


@lru_cache(maxsize=32)
def _share_of_top(slots: int, load: float, prefill: float, mean_tokens: float, limit_answers: float) -> float:
    server = Batching(slots, 0.01, load, prefill, mean_tokens, limit_answers)
    rng = np.random.default_rng(0)
    limit_s = server.slo.objectives[0].limit / 1000
    low, high = 0.5, 1.0
    for _ in range(6):
        share = (low + high) / 2
        due = np.cumsum(rng.exponential(1 / (share * server.top_qps), 60_000))
        waits = np.sort(np.array([a for a, _ in server.answer(due, rng)])[3000:] - due[3000:])
        low, high = (share, high) if quantile(waits, 0.95) <= limit_s else (low, share)
    return (low + high) / 2


@dataclass
class Found:
    """What a search measured. `rates` are those that were asked for."""

    frontier: Frontier
    steps: list[Step] = field(default_factory=list)
    done: Done | None = None


def measure(server: Server, step: Step, rng: np.random.Generator) -> FrontierPoint:
    lead_s = max(2 * server.answer_s, LEAD_SHARE * step.window_s)
    num_lead = round(step.qps * lead_s)
    due = np.cumsum(rng.exponential(1 / step.qps, step.num_requests + num_lead))
    timings = []
    for i, (t, (first, end)) in enumerate(zip(due.tolist(), server.answer(due, rng), strict=True)):
        t_ns, first_ns, end_ns = (round(v * NS_PER_S) for v in (t, first, end))
        chunks = (Chunk(first_ns, 1),) if end_ns == first_ns else (Chunk(first_ns, 1), Chunk(end_ns, 1))
        timings.append(RequestTiming(str(i), t_ns, t_ns, None, end_ns, chunks, 1, len(chunks)))
    measured = timings[num_lead:]
    # As a run does: given up half way when it is hopeless.
    half_ns = (measured[0].t_send_ns + measured[-1].t_send_ns) // 2
    if hopeless(server.slo, [t for t in measured if t.t_end_ns <= half_ns]):
        timings = [_cut(t, half_ns) for t in timings if t.t_send_ns <= half_ns]
        measured = timings[num_lead:]
    judged = [t for t in measured if t.error is None]
    balance = balance_of(timings, measured[0].t_send_ns)
    slo, margin = judge(server.slo, judged).of_load(balance), margin_interval(server.slo, judged)
    assert margin is not None
    arrived = arrival_rate(measured) or step.qps
    rate = min(step.qps, arrived)
    if slo.verdict == "pass" and balance is not None:
        rate = min(rate, balance.completed_qps)
    return FrontierPoint(
        *(rate, None, None, slo.verdict, margin.margin, margin.low, margin.high),
        arrival_qps=arrived,
        is_scout=step.role == "scout",
        balance=balance,
    )


def _cut(t: RequestTiming, at_ns: int) -> RequestTiming:
    if t.t_end_ns <= at_ns:
        return t
    return RequestTiming(
        t.request_id, t.t_intended_ns, t.t_send_ns, None, at_ns, tuple(c for c in t.chunks if c.t_ns <= at_ns), 1, 0,
        error=CENSORED,
    )  # fmt: skip


def search(server: Server, rng: np.random.Generator, *, budget_s: float = 160.0, num_points: int = 10) -> Found:
    overhead_s = 4 * server.answer_s + 0.2
    burst_qps = server.top_qps * float(np.exp(rng.normal(0, 0.1)))  # a burst tells it roughly
    limits = Limits(
        *(min(1 / server.answer_s, server.top_qps) / 2, burst_qps, 0.7 * burst_qps, num_points, FLOOR, overhead_s),
        search_s=budget_s,
    )
    points: list[FrontierPoint] = []
    found = Found(Frontier(()))
    left_s = budget_s
    while isinstance(step := next_step(found.frontier, len(points), left_s, limits), Step):
        points.append(measure(server, step, rng))
        found.steps.append(step)
        left_s -= (points[-1].balance.span_s if points[-1].balance else step.num_requests / step.qps) + overhead_s
        left_s -= LEAD_SHARE * step.window_s
        found.frontier = Frontier.of(points, server.idle_margin)
    found.done = step
    return found

"""Which rate comes next: the search closes in on the knee of any monotone service, and certifies a rate on each side
of it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from inferloop.bench.decide import Done, Limits, Step, next_step, on_grid
from inferloop.measure.frontier import Frontier, FrontierPoint
from inferloop.measure.verdict import Verdict

FLOOR = 143


def service(knee: float, step: Step) -> FrontierPoint:
    """Latency grows as in a queue, with 1 / (1 - utilization), and meets the limit at the knee."""
    utilization = step.qps / (knee / 0.7)
    latency = 1 / (1 - utilization) if utilization < 1 else math.inf
    margin = 1 - latency * 0.3
    spread = 0.3 if step.role == "scout" else 0.05
    verdict: Verdict = "fail" if margin < 0 else "pass" if margin > spread else "inconclusive"
    low, high = (-math.inf, -math.inf) if math.isinf(margin) else (margin - spread, min(1.0, margin + spread))
    return FrontierPoint(
        *(step.qps, step.qps, None, verdict if step.role == "certified" else "inconclusive", margin, low, high),
        is_scout=step.role == "scout",
    )


def search(
    knee: float, serial: float, burst: float, *, budget_s: float = math.inf, num_points: int = 7
) -> tuple[list[Step], Frontier, Done, float]:
    total_s = min(budget_s, 40 * FLOOR / min(knee, burst))
    limits = Limits(serial, burst, 0.7 * burst, num_points, FLOOR, 1.0, total_s)
    steps: list[Step] = []
    found: list[FrontierPoint] = []
    left_s = total_s
    while isinstance(step := next_step(Frontier.of(found, 0.7), len(found), left_s, limits), Step):
        steps.append(step)
        found.append(service(knee, step))
        left_s -= step.window_s + limits.overhead_s
        assert len(steps) <= num_points
    return steps, Frontier.of(found, 0.7), step, left_s


@given(st.floats(0.5, 100), st.floats(0.1, 1.0), st.floats(0.9, 2.0))
def test_a_certified_rate_lies_on_each_side_of_the_knee(knee: float, serial: float, burst: float) -> None:
    steps, frontier, done, left_s = search(knee, knee * serial, knee * burst)
    assert left_s >= 0
    assert steps[0].role == "scout"
    roles = [s.role for s in steps]
    assert roles == sorted(roles, reverse=True), "scouts first"
    assert all(s.num_requests >= FLOOR for s in steps if s.role == "certified")
    capacity = frontier.capacity()
    assert capacity.low <= knee * 1.001, done
    if capacity.high is not None and capacity.low:
        assert capacity.high >= knee * 0.999
        assert capacity.interval is not None
        assert capacity.interval.low <= knee <= capacity.interval.high


@given(st.floats(0.5, 100), st.floats(1.0, 300.0), st.integers(0, 12))
def test_no_point_outlasts_the_budget(knee: float, budget_s: float, num_points: int) -> None:
    steps, _, _, left_s = search(knee, knee / 3, knee, budget_s=budget_s, num_points=num_points)
    assert left_s >= -1e-9
    assert len(steps) <= num_points


def test_two_runs_of_one_service_meet_the_same_rates() -> None:
    first, second = (search(10.0, 3.0, burst)[0] for burst in (11.6, 12.0))
    assert [s.qps for s in first] == [s.qps for s in second]
    assert on_grid(9.9) == on_grid(10.1) == 10.0


def test_nothing_kept_ends_the_search_low() -> None:
    steps, frontier, done, _ = search(0.01, 1.0, 4.0)
    assert frontier.capacity().qps == 0.0
    assert min(s.qps for s in steps) >= 0.095
    assert isinstance(done, Done)


def test_nothing_missed_ends_the_search_above_the_burst() -> None:
    steps, frontier, _, _ = search(1000.0, 1.0, 4.0)
    assert 4.0 < max(s.qps for s in steps) <= 8.0
    assert frontier.capacity().high is None


def test_where_less_comes_than_was_asked_more_is_asked() -> None:
    """Conversations that begin in a short window bring their later turns after it."""
    limits = Limits(10.0, 100.0, 70.0, 10, FLOOR, 1.0, 300.0)
    asked: list[float] = []
    found: list[FrontierPoint] = []
    while isinstance(step := next_step(Frontier.of(found), len(found), 300.0, limits), Step) and step.role == "scout":
        asked.append(step.qps)
        come = 0.6 * step.qps
        found.append(FrontierPoint(come, come, None, "pass", 0.9, 0.8, 0.95, is_scout=True, asked_qps=step.qps))
    assert asked == sorted(set(asked)) and asked[-1] > 100.0, asked

"""Arrivals against completions, the rate that is sustained, and a capacity that is never above it."""

from __future__ import annotations

import numpy as np
import pytest

from inferloop.core.units import NS_PER_S
from inferloop.measure.balance import Balance, balance_of
from inferloop.measure.columns import CENSORED
from inferloop.measure.frontier import Frontier, FrontierPoint
from inferloop.measure.sustained import sustained_rate
from inferloop.measure.timing import Chunk, RequestTiming


def level(offered_qps: float, service_qps: float, num: int, *, cut_s: float | None = None) -> list[RequestTiming]:
    """Poisson arrivals at a server that takes exactly 1 / `service_qps` for each."""
    due = np.cumsum(np.random.default_rng(0).exponential(1 / offered_qps, num))
    free, out = 0.0, []
    for i, at in enumerate(due.tolist()):
        free = max(free, at) + 1 / service_qps
        t, end = round(at * NS_PER_S), round(free * NS_PER_S)
        if cut_s is not None and t > cut_s * NS_PER_S:
            break
        late = cut_s is not None and end > cut_s * NS_PER_S
        end = round((cut_s or 0) * NS_PER_S) if late else end
        chunks = () if late else (Chunk(end, 1),)
        out.append(RequestTiming(str(i), t, t, None, end, chunks, 1, 1, error=CENSORED if late else None))
    return out


def test_a_queue_that_grows_is_told_with_what_is_completed() -> None:
    found = balance_of(level(60.0, 45.0, 1000))
    assert found is not None
    assert found.verdict == "saturated"
    assert found.completed_qps == pytest.approx(45.0, rel=0.01)
    assert found.growth == pytest.approx(0.25, abs=0.05)
    assert "the queue grows" in found.reason


def test_where_the_load_was_given_up_the_window_ends() -> None:
    found = balance_of(level(60.0, 45.0, 1000, cut_s=10.0))
    assert found is not None
    assert (found.verdict, round(found.span_s)) == ("saturated", 10)
    assert found.completed_qps == pytest.approx(45.0, rel=0.03)


def test_a_queue_that_holds_is_sustained_given_enough_requests() -> None:
    found = balance_of(level(30.0, 45.0, 1000))
    assert found is not None
    assert found.verdict == "sustained" and found.low <= 0 <= found.high < found.tolerance
    assert balance_of(level(30.0, 45.0, 30)) is None
    assert balance_of([]) is None


def test_one_percent_over_cannot_be_told() -> None:
    found = balance_of(level(45.5, 45.0, 400))
    assert found is not None and found.verdict != "saturated"


def saturated(completed_qps: float, arrived_qps: float = 60.0) -> Balance:
    return Balance("saturated", arrived_qps, completed_qps, 1.0, 0.2, 0.1, 0.3, 0.05, 800, 20.0)


def test_levels_that_differ_more_than_their_errors_widen_the_pooled_error() -> None:
    alike = sustained_rate([saturated(45.0), saturated(45.2), saturated(44.8), saturated(45.0)])
    apart = sustained_rate([saturated(45.0), saturated(49.0), saturated(41.0), saturated(45.0)])
    assert alike is not None and apart is not None
    assert alike.qps == pytest.approx(apart.qps) == pytest.approx(45.0)
    assert apart.error > 1.5 * alike.error and apart.drift > alike.drift
    assert sustained_rate([]) is None


def test_the_capacity_is_not_above_what_is_sustained() -> None:
    """The level that failed was given up when its latency had just reached the limit: its margin says nothing."""
    keeps_up = Balance("sustained", 44.0, 43.8, 0.5, 0.0, -0.02, 0.02, 0.05, 1000, 25.0)
    frontier = Frontier.of(
        [
            FrontierPoint(43.8, None, None, "pass", 0.6, 0.55, 0.65, arrival_qps=44.0, balance=keeps_up),
            FrontierPoint(57.0, None, None, "fail", -0.03, -0.1, 0.1, arrival_qps=57.0, balance=saturated(46.0)),
            FrontierPoint(56.0, None, None, "fail", -0.03, -0.1, 0.1, arrival_qps=56.0, balance=saturated(45.0)),
        ],
        0.9,
    )
    capacity = frontier.capacity()
    assert capacity.interval is not None
    assert 43.8 <= capacity.qps <= 45.5
    assert capacity.interval.low <= capacity.qps <= capacity.interval.high < 51.0
    assert capacity.interval.half_width < 0.15

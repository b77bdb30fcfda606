"""The search closes in on the knee of any monotone service."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from inferloop.bench.rates import next_rate
from inferloop.measure.frontier import Frontier, FrontierPoint
from inferloop.measure.verdict import Verdict


def service(knee: float, rate: float, *, doubt: float = 0.0) -> FrontierPoint:
    """Margin falls as in a queue: latency grows with 1 / (1 - utilization) and meets the limit at the knee."""
    utilization = rate / (knee / 0.8)
    latency = 1 / (1 - utilization) if utilization < 1 else math.inf
    margin = (5.0 - latency) / 5.0 if math.isfinite(latency) else -math.inf
    verdict: Verdict = "pass" if margin > doubt else "fail" if margin < 0 else "inconclusive"
    return FrontierPoint(rate, rate, None, verdict, margin)


def search(knee: float, serial: float, burst: float, *, doubt: float = 0.0) -> list[FrontierPoint]:
    points: list[FrontierPoint] = []
    while (rate := next_rate(points, serial_qps=serial, burst_qps=burst)) is not None and len(points) < 12:
        points.append(service(knee, rate, doubt=doubt))
    return points


@given(st.floats(0.5, 100), st.floats(0.05, 1.0), st.floats(0.9, 2.0), st.sampled_from([0.0, 0.2]))
def test_brackets_the_knee_in_few_points(knee: float, serial_share: float, burst_share: float, doubt: float) -> None:
    points = search(knee, knee * serial_share, knee * burst_share, doubt=doubt)
    assert len(points) <= 8
    rates = [p.offered_qps for p in points]
    assert len(set(rates)) == len(rates)
    capacity = Frontier.of(points).capacity()
    assert capacity.monotone
    if doubt == 0.0 and capacity.high is not None and capacity.low > 0:
        assert capacity.low <= knee * (1 + 1e-9)
        assert capacity.high > knee
        assert capacity.high / capacity.low <= 1.5


def test_nothing_passes_ends_the_search() -> None:
    points = search(0.01, 1.0, 4.0)
    assert 1 <= len(points) <= 8
    assert Frontier.of(points).capacity().qps == 0.0


def test_nothing_fails_ends_the_search_above_the_burst() -> None:
    points = search(1000.0, 1.0, 4.0)
    assert 4.0 < max(p.offered_qps for p in points) <= 8.0

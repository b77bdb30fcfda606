"""What becomes of the points: the frontier and its rates."""

from __future__ import annotations

import pytest

from inferloop.bench.result import BenchPoint, frontier_of, saturated
from inferloop.core.slo import Objective, Slo
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.summary import summarize
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.measure.verdict import judge


def point(offered_qps: float, arrival_qps: float, *, void: tuple[str, ...] = ()) -> BenchPoint:
    requests = []
    for i in range(200):
        t = round(i / arrival_qps * NS_PER_S)
        chunks = (Chunk(t + 50 * NS_PER_MS, 1),)
        requests.append(RequestTiming("r", t, t, None, chunks[0].t_ns, chunks, 10, 1))
    summary = summarize(requests, mode="open", offered_qps=offered_qps)
    slo = judge(Slo((Objective("ttft_ms", 0.95, 100.0),)), requests)
    return BenchPoint("p", "open", offered_qps, summary, slo, void, (), 0, 1.0)


def test_a_window_that_was_lighter_by_chance_certifies_no_more_than_what_arrived() -> None:
    capacity = frontier_of([point(180.0, 150.0)]).capacity()
    assert capacity.low == pytest.approx(150.0)
    assert frontier_of([point(100.0, 120.0)]).capacity().low == 100.0


def test_void_points_are_not_on_the_frontier() -> None:
    assert frontier_of([point(10.0, 10.0, void=("late",))]).points == ()


def burst(requests: list[RequestTiming]) -> BenchPoint:
    slo = judge(Slo(), requests)
    return BenchPoint("burst", "burst", None, summarize(requests, mode="burst"), slo, (), (), 0, 1.0)


def test_a_burst_that_fits_at_once_tells_of_no_more_than_that() -> None:
    """Ten answers that start together and end after 0.9 to 1 s: their completions alone would be 90 a second."""
    requests = []
    for i in range(10):
        end_ns = (900 + 10 * i) * NS_PER_MS
        requests.append(RequestTiming("r", None, 0, None, end_ns, (Chunk(end_ns, 1),), 10, 1))
    found = saturated([burst(requests)])
    assert found.qps == pytest.approx(10 / 0.945)
    assert "all of it was in flight at once" in found.reason


def test_a_filling_pipeline_is_not_held_against_the_capacity() -> None:
    requests = []
    for i in range(81):
        end = Chunk(20 * NS_PER_S + i * NS_PER_S // 2, 1)
        requests.append(RequestTiming("r", None, 0, None, end.t_ns, (end,), 10, 1))
    found = saturated([burst(requests)])
    assert found.qps == pytest.approx(2.0) and "at once" not in found.reason
    assert saturated([]).method == "none"

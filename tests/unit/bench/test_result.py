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


def test_a_batch_that_starts_together_completes_no_faster_than_its_tokens_come() -> None:
    """Ten answers of 10, 20 .. 100 tokens side by side, a token of each every 10 ms: nothing ends before 100 ms, so
    completions alone would make it 10 per second; 550 tokens in a second are work for less."""
    requests = []
    for i in range(1, 11):
        chunks = tuple(Chunk((k + 1) * 10 * NS_PER_MS, 1) for k in range(10 * i))
        requests.append(RequestTiming("r", None, 0, None, chunks[-1].t_ns, chunks, 10, 10 * i))
    summary = burst(requests).summary
    assert summary.achieved_qps == pytest.approx(10.0)
    assert summary.output_tok_s == pytest.approx(540 / 0.99)
    assert saturated([burst(requests)]).qps == pytest.approx(540 / 0.99 / 55)


def test_a_filling_pipeline_is_not_held_against_the_capacity() -> None:
    requests = []
    for i in range(81):
        end = Chunk(20 * NS_PER_S + i * NS_PER_S // 2, 1)
        requests.append(RequestTiming("r", None, 0, None, end.t_ns, (end,), 10, 1))
    assert saturated([burst(requests)]).qps == pytest.approx(2.0)
    assert saturated([]).method == "none"

"""First answers, chunks, reading, sessions, goodput; and what arrays tell against what loops over requests tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.core.slo import LATENCY_METRICS, Objective, Slo
from inferloop.core.units import NS_PER_MS
from inferloop.measure import timing
from inferloop.measure.columns import Columns
from inferloop.measure.quantiles import quantile
from inferloop.measure.samples import METRICS, collect
from inferloop.measure.sessions import session_samples, sessions
from inferloop.measure.stutter import stutter
from inferloop.measure.summary import summarize
from inferloop.measure.timing import DEFINITIONS, Chunk, RequestTiming
from inferloop.measure.verdict import judge


def request(
    chunks: list[tuple[float, int]], *, send: float = 0.0, intended: float | None = None, **more: object
) -> RequestTiming:
    """Times in ms."""
    made = tuple(Chunk(round(t * NS_PER_MS), n) for t, n in chunks)
    end = made[-1].t_ns if made else round(send * NS_PER_MS)
    due = None if intended is None else round(intended * NS_PER_MS)
    base = RequestTiming("r", due, round(send * NS_PER_MS), None, end, made, 10, sum(n for _, n in chunks))
    return replace(base, **more)  # type: ignore[arg-type]


def thinking(*, answer: bool) -> RequestTiming:
    """Reasoning from 100 ms on, the answer from 5 s on."""
    chunks = [(100.0 + 70 * i, 1) for i in range(70)] + ([(5000.0, 1), (5070.0, 1)] if answer else [])
    return request(chunks, intended=0.0, t_first_answer_ns=5000 * NS_PER_MS if answer else None)


def test_thinking_counts_as_first_token_and_not_as_first_answer() -> None:
    summary = summarize([thinking(answer=True)] * 20, mode="open").as_json()
    assert summary["ttft_ms"]["p50"] == 100.0
    assert summary["ttfat_ms"]["p50"] == summary["response_ttfat_ms"]["p50"] == 5000.0
    only = summarize([thinking(answer=False)] * 20, mode="open").as_json()
    assert only["ttft_ms"]["p50"] == 100.0
    assert only["ttfat_ms"]["p50"] is None
    assert only["ttfat_ms"]["mean"] is None
    assert only["errors"]["rate"] == 0.0
    assert timing.ttfat_ms(thinking(answer=True)) == timing.response_ttfat_ms(thinking(answer=True)) == 5000.0
    assert timing.ttfat_ms(thinking(answer=False)) is timing.response_ttfat_ms(thinking(answer=False)) is None


def test_bundled_frames_are_reported_as_what_they_are() -> None:
    bundled = [request([(100, 4), (140, 4), (180, 4), (220, 4)])] * 20
    summary = summarize(bundled, mode="serial")
    assert (summary.icl_ms.p50, summary.itl_ms.p50, summary.tpot_ms.p50) == (40.0, 10.0, 10.0)
    assert summary.tokens_per_chunk == 4.0
    assert summary.max_gap_ms.p50 == 40.0
    assert "token" not in DEFINITIONS["icl_ms"]


def test_service_and_response_latency_stand_side_by_side() -> None:
    late = [request([(300, 1), (400, 1)], send=200, intended=0)] * 20
    summary = summarize(late, mode="open")
    assert summary.response_ttft_ms is not None and summary.response_ttlt_ms is not None
    assert (summary.ttft_ms.p50, summary.response_ttft_ms.p50) == (100.0, 300.0)
    assert (summary.ttlt_ms.p50, summary.response_ttlt_ms.p50) == (200.0, 400.0)


def test_a_reader_is_blocked_only_when_the_buffer_is_empty() -> None:
    """At 10 tokens/s five tokens last until 500, the one that comes at 700 until 800, and the next comes at 1000."""
    r = request([(0, 5), (700, 1), (1000, 1)])
    assert timing.blocked_ms(r, 10.0) == pytest.approx(400.0)
    assert timing.blocked_ms(request([(0, 50), (700, 1), (1000, 1)]), 10.0) == 0.0
    assert timing.blocked_ms(request([])) is None
    assert timing.max_gap_ms(r) == 700.0
    assert timing.max_gap_ms(request([(0, 5)])) is None


def test_every_number_is_defined() -> None:
    summary = summarize([request([(100, 1), (110, 1)], intended=0, session=1, turn=0)] * 30, mode="open").as_json()
    latencies = {name for name, value in summary.items() if isinstance(value, dict) and "p50" in value}
    assert latencies <= set(DEFINITIONS)
    assert {name for name in DEFINITIONS if name not in summary} == {"goodput", "goodput_qps"}
    assert set(LATENCY_METRICS) <= set(METRICS)


_OURS: dict[str, Callable[[RequestTiming], float | list[float] | None]] = {
    "ttft_ms": timing.ttft_ms,
    "ttfat_ms": timing.ttfat_ms,
    "ttlt_ms": timing.ttlt_ms,
    "tpot_ms": timing.tpot_ms,
    "itl_ms": timing.itl_ms,
    "icl_ms": timing.icl_ms,
    "max_gap_ms": timing.max_gap_ms,
    "blocked_ms": timing.blocked_ms,
    "queue_ms": lambda r: r.queue_ms,
}
_ANY = st.builds(
    lambda gaps, send, late, answer, queue, error: replace(
        request(
            [(send + late + sum(g for g, _ in gaps[: i + 1]), n) for i, (_, n) in enumerate(gaps)],
            send=send,
            intended=send - late,
        ),
        t_first_answer_ns=round((send + answer) * NS_PER_MS) if answer else None,
        queue_ms=queue,
        error=error,
    ),
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 5)), max_size=6),
    st.integers(0, 10_000),
    st.integers(0, 50),
    st.integers(0, 50),
    st.none() | st.floats(0, 100),
    st.sampled_from([None, None, None, "timeout", "http_4xx"]),
)


@given(st.lists(_ANY, max_size=12))
def test_arrays_tell_what_the_definitions_tell(requests: list[RequestTiming]) -> None:
    for metric, of in _OURS.items():
        slow = [of(r) for r in requests if r.error is None]
        expected = sorted(v for value in slow for v in (value if isinstance(value, list) else [value]) if v is not None)
        samples = collect(metric, requests)
        assert np.sort(samples.values) == pytest.approx(expected, abs=1e-6), metric
    assert collect("ttft_ms", Columns.of(requests)).num_total == collect("ttft_ms", requests).num_total


def test_an_empty_stream_leaves_nothing_negative_behind() -> None:
    """A request whose first token never came must not become a difference with an unset stamp."""
    good = [request([(50, 1), (80, 1)], send=i, intended=i) for i in range(99)]
    empty = request([], send=5, intended=5, error="empty_stream", empty_frames_ns=(9 * NS_PER_MS,), t_end_ns=10**7)
    summary = summarize([*good, empty], mode="open")
    for latency in (summary.ttft_ms, summary.response_ttft_ms, summary.ttlt_ms, summary.tpot_ms):
        assert latency is not None and latency.mean is not None and latency.mean > -50.0
        assert latency.p50 is not None and latency.num_samples == 100
    assert summary.errors == {"rate": 0.01, "by_class": {"empty_stream": 1}}


def test_the_first_burst_of_a_closed_loop_is_seen_in_the_whole_window() -> None:
    """Eight prefills one after another; later ones alone."""
    requests = [request([(100.0 * (i + 1), 1)]) for i in range(8)]
    requests += [request([(4000.0 * k + 100, 1)], send=4000.0 * k) for k in range(1, 73) for _ in (0,)]
    ordered = np.sort(collect("ttft_ms", requests).values)
    assert quantile(ordered, 0.95) == pytest.approx(400.0)
    assert quantile(ordered, 0.99) == pytest.approx(800.0)


def turn(number: int, k: int, start: float, end: float, *, of: int = 3, **more: object) -> RequestTiming:
    return request([(end, 1)], send=start, intended=start, session=number, turn=k, num_turns=of, **more)


def test_a_session_lasts_from_its_first_intent_to_its_last_end() -> None:
    whole = [turn(1, 0, 0, 100), turn(1, 1, 400, 500), turn(1, 2, 900, 1000)]
    broken = [turn(2, 0, 0, 100), turn(2, 1, 300, 350, error="timeout")]
    unfinished = [turn(3, 0, 50, 100)]
    found = sessions([*unfinished, *whole[::-1], *broken, request([(5, 1)])])
    assert [(s.session, s.session_ms, s.num_turns, s.error) for s in found] == [
        (1, 1000.0, 3, None),
        (2, 350.0, 2, "timeout"),
        (3, 50.0, 1, "censored"),
    ]
    samples = session_samples([*whole, *broken, *unfinished])
    assert (list(samples.values), samples.num_failed, list(samples.hidden)) == ([1000.0], 1, [50.0])
    assert summarize(whole, mode="open").session_ms is not None
    assert summarize([request([(5, 1)])], mode="open").session_ms is None


def test_a_session_that_began_in_the_warm_up_is_no_sample() -> None:
    """Its first turns were not measured: it is neither as long as the rest of it nor unfinished."""
    whole = [turn(1, k, 10 * k, 10 * k + 5) for k in range(3)]
    rest = [turn(2, k, 10 * k, 10 * k + 5) for k in (1, 2)]
    assert [s.session for s in sessions([*whole, *rest])] == [1]
    samples = session_samples([*whole, *rest])
    assert (samples.values.tolist(), samples.num_total) == ([25.0], 1)


def test_goodput_is_of_what_was_offered() -> None:
    slo = Slo((Objective("ttft_ms", 0.95, 450.0), Objective("tpot_ms", 0.95, 20.0)))
    kept = [request([(10 * i + 100, 1), (10 * i + 110, 1)], send=10 * i, intended=10 * i) for i in range(60)]
    slow = [request([(10 * i + 500, 1)], send=10 * i, intended=10 * i) for i in range(60, 80)]
    jerky = [request([(10 * i + 100, 1), (10 * i + 150, 1)], send=10 * i, intended=10 * i) for i in range(80, 90)]
    lost = [request([], send=10 * i, intended=10 * i, error="http_5xx") for i in range(90, 101)]
    ours = [request([], send=1010, intended=1010, error="client")]
    verdict = judge(slo, [*kept, *slow, *jerky, *lost, *ours])
    assert verdict.goodput == pytest.approx(60 / 101)
    assert verdict.goodput_qps == pytest.approx(60 / 101 * 100.0)
    assert verdict.goodput_interval is not None
    assert verdict.goodput_interval.low <= 60 / 101 <= verdict.goodput_interval.high
    told = verdict.as_json()
    assert told["goodput_qps"] == verdict.goodput_qps
    closed = judge(slo, [request([(100.0 * (i + 1), 1)], send=100.0 * i) for i in range(50)])
    assert closed.goodput == 1.0
    assert closed.goodput_qps == pytest.approx(10.0)


def test_many_objectives_share_the_risk_of_a_wrong_fail() -> None:
    """One of 12 over a p99: a service that keeps it shows that in 11 % of the runs; two of 5 in 0.1 %, but ten such
    objectives would show it ten times as often."""
    over = [request([(900, 1), (910, 1)], intended=0)] * 2 + [request([(100, 1), (110, 1)], intended=0)] * 14
    one = Objective("ttft_ms", 0.99, 450.0)
    assert judge(Slo((one,)), over).verdict == "inconclusive"
    assert judge(Slo((one,)), over[:13]).verdict == "fail"
    others = tuple(Objective(m, q, 1e6) for m in ("tpot_ms", "ttlt_ms", "itl_ms") for q in (0.9, 0.95, 0.99))
    assert judge(Slo((one, *others)), over[:13]).verdict == "inconclusive"


def test_infinite_percentiles_are_told_without_infinity() -> None:
    lost = [request([], send=float(i), intended=float(i), error="timeout") for i in range(250)]
    some = [request([(10_000.0 + i, 1)], send=float(i), intended=float(i)) for i in range(250, 256)]
    latency = summarize([*lost, *some], mode="open").response_ttft_ms
    assert latency is not None and latency.p95 == math.inf and latency.successes["p95"] == pytest.approx(10_000.0)
    told = latency.as_json()
    assert (told["p95"], "p95" in told["infinite"]) == (None, True)
    assert told["intervals"]["p95"] == {
        "low": None,
        "high": None,
        "infinite": ["low", "high"],
        "confidence": 0.95,
        "num_blocks": 12,
    }


def test_stutter_of_nobody_is_none() -> None:
    assert stutter([request([(1, 1)]), request([(1, 1), (900, 1)], error="timeout")]) is None

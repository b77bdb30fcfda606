"""Throughput, fill, backlog: the numbers of one point against cases worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure import little, timing
from inferloop.measure.invariants import violations
from inferloop.measure.quantiles import quantile
from inferloop.measure.samples import collect
from inferloop.measure.summary import summarize, token_rate
from inferloop.measure.timing import Chunk, RequestTiming


def request(send_s: float, first_s: float, end_s: float, **more: Any) -> RequestTiming:
    send, first, end = (round(t * NS_PER_S) for t in (send_s, first_s, end_s))
    values: dict[str, Any] = {
        "request_id": "r",
        "t_intended_ns": None,
        "t_send_ns": send,
        "t_headers_ns": None,
        "t_end_ns": end,
        "chunks": (Chunk(first, 1),) if end == first else (Chunk(first, 1), Chunk(end, 4)),
        "num_input_tokens": 1,
        "num_output_tokens": 1,
    }
    return RequestTiming(**{**values, **more})


def backlog(*, closed: bool) -> list[RequestTiming]:
    """A server of 200 ms, one in flight at a time, 10 requests per second intended."""
    return [
        request(0.2 * i, 0.2 * (i + 1), 0.2 * (i + 1), t_intended_ns=None if closed else round(0.1 * i * NS_PER_S))
        for i in range(50)
    ]


def test_client_backlog_shows_up_in_response_latency() -> None:
    requests = backlog(closed=False)
    service = sorted(collect("ttlt_ms", requests).values)
    response = sorted(collect("ttlt_ms", requests, from_intended=True).values)
    assert quantile(service, 0.5) == pytest.approx(200.0)
    assert quantile(service, 0.99) == pytest.approx(200.0)
    assert quantile(response, 0.5) == pytest.approx(2600.0)
    assert quantile(response, 0.99) == pytest.approx(5100.0)
    delay = summarize(requests, mode="open", offered_qps=10.0).schedule_delay_ms
    assert summarize(requests, mode="open", offered_qps=12.0).arrival_qps == pytest.approx(10.0)
    assert delay is not None
    assert delay.p50 == pytest.approx(2400.0)


def test_a_closed_loop_has_no_response_latency() -> None:
    json = summarize(backlog(closed=True), mode="serial").as_json()
    assert json["response_ttft_ms"] is None
    assert json["response_ttlt_ms"] is None
    assert json["schedule_delay_ms"] is None
    assert json["arrival_qps"] is None


def test_chunks_of_several_tokens_are_not_tokens() -> None:
    chunks = tuple(Chunk(t * NS_PER_MS, 4) for t in (100, 140, 180, 220))
    r = request(0, 0, 0, chunks=chunks, t_end_ns=220 * NS_PER_MS)
    assert timing.icl_ms(r) == [40.0, 40.0, 40.0]
    assert timing.tpot_ms(r) == 10.0
    assert timing.itl_ms(r) == [10.0] * 12
    itl = summarize([r] * 20, mode="serial").itl_ms
    assert itl.p50 == 10.0


def test_token_rate_spans_first_to_last_token() -> None:
    r = request(0, 0, 0, chunks=(Chunk(1 * NS_PER_S, 1), Chunk(2 * NS_PER_S, 10), Chunk(3 * NS_PER_S, 10)))
    assert token_rate([r]) == 10.0
    assert token_rate([]) is None


def test_empty_stream_has_no_first_token_time() -> None:
    requests = [request(0, 0.1, 0.5)] * 99 + [request(0, 0, 0.3, chunks=(), error="empty_stream")]
    ttft = summarize(requests, mode="burst").as_json()["ttft_ms"]
    assert ttft["mean"] == pytest.approx(100.0)
    assert timing.ttft_ms(requests[-1]) is None
    assert summarize(requests, mode="burst").errors["rate"] == 0.01


def test_nothing_at_all_gives_nulls() -> None:
    json = summarize([], mode="open", offered_qps=1.0).as_json()
    assert json["num_requests"] == 0
    assert json["ttft_ms"]["mean"] is None
    assert json["errors"] == {"rate": None, "by_class": {}}


def test_littles_law_finds_a_lost_record() -> None:
    requests = [request(0.1 * i, 0.1 * i + 0.2, 0.1 * i + 1.0) for i in range(100)]
    span_s = 10.9
    truth = 100 * 1.0 / span_s
    sound = little.check(requests, in_flight=truth)
    assert sound is not None
    assert sound.ok
    lossy = little.check([r for i, r in enumerate(requests) if i % 10 != 5], in_flight=truth)
    assert lossy is not None
    assert not lossy.ok
    assert lossy.difference == pytest.approx(0.1)
    assert little.check([]) is None


def test_time_average_counts_only_the_window() -> None:
    assert little.time_averaged_in_flight([(0, 10), (5, 15)], 5, 10) == 2.0
    assert little.time_averaged_in_flight([(0, 10)], 5, 15) == 0.5
    with pytest.raises(ValueError, match="empty window"):
        little.time_averaged_in_flight([], 5, 5)


def test_broken_stamps_are_named() -> None:
    assert violations(request(0, 0.1, 0.2)) == ()
    assert "backwards" in violations(request(0.5, 0.1, 0.2))[0]
    assert "intended" in violations(request(0.0, 0.1, 0.2, t_intended_ns=5))[0]
    assert "without a token" in violations(request(0.0, 0.1, 0.2, chunks=()))[0]
    assert "before the send" in violations(request(0.05, 0.1, 0.2, t_first_answer_ns=5))[0]
    assert "after the end" in violations(request(0.05, 0.1, 0.2, empty_frames_ns=(NS_PER_S,)))[0]

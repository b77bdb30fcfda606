"""Faults that load generators have had in public, each with the scenario and the figure that is right.

Those with recorded stamps and on virtual time; what needs sockets is in test_fault_classes_live.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from inferloop.bench.agenda import Agenda
from inferloop.bench.checks import Checks, self_checks
from inferloop.bench.drive import DriveResult
from inferloop.bench.plan import steps_of
from inferloop.bench.render import RenderedRequest, RenderOptions, render
from inferloop.bench.stream import StreamReader
from inferloop.contract.load import parse
from inferloop.contract.sample import sample_workload
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.slo import Objective, Slo
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.compat import compat_view
from inferloop.measure.quantiles import quantile
from inferloop.measure.samples import collect
from inferloop.measure.summary import achieved_rate, summarize
from inferloop.measure.timing import Chunk, RequestTiming, icl_ms, itl_ms, schedule_delay_ms, tpot_ms
from inferloop.measure.verdict import judge

SLO = Slo((Objective("ttft_ms", 0.95, 1000.0),), max_error_rate=0.01)
OWN = (Segment(1, 10),)


def quantiles_ms(metric: str, requests: Sequence[RequestTiming], *, from_intended: bool) -> tuple[float, float]:
    """p50 and p99, whether so few can certify them or not."""
    ordered = collect(metric, requests, from_intended=from_intended).adjusted()
    return quantile(ordered, 0.5), quantile(ordered, 0.99)


def checked(timings: Sequence[RequestTiming], **more: Any) -> Checks:
    counted = Counter({"server": sum(t.ok for t in timings)})
    return self_checks(DriveResult(timings=list(timings), counted_by=counted, **more), timings, (), SLO, 0.0)


def play(
    times_s: Sequence[float], service_ms: float, *, in_flight: int, frozen_s: tuple[float, float] = (-1.0, -1.0)
) -> tuple[list[RequestTiming], int]:
    """A perfect client with so many connections, of a server that answers after `service_ms` however many it has, but
    not while it is frozen: what had come by then is answered when it thaws. (requests, end in ns)"""
    plan = [TimedRequest(i, t, OWN, 1) for i, t in enumerate(times_s)]
    agenda, now = Agenda(steps_of(plan), max_in_flight=in_flight), 0
    frozen, thawed = (round(t * NS_PER_S) for t in frozen_s)
    running: list[tuple[int, int]] = []
    made: list[RequestTiming] = []
    while not (agenda.finished and not running):
        for due in agenda.due(now, len(running)):
            end = max(now, thawed if now >= frozen else now) + round(service_ms * NS_PER_MS)
            if now < frozen < end:
                end += thawed - frozen
            heapq.heappush(running, (end, due.position))
            made.append(RequestTiming("r", due.t_intended_ns, now, now, end, (Chunk(end, 1),), 10, 1))
        wakes = [t for t in (agenda.next_wake_ns, running[0][0] if running else None) if t is not None]
        now = max(now, min(wakes))
        while running and running[0][0] <= now:
            end, position = heapq.heappop(running)
            agenda.ended(position, end, failed=False)
    return made, now


def test_client_backlog_is_in_the_response_latency_and_voids() -> None:
    """Constant 10 requests/s, 50 of them, one in flight, answers in 200 ms: the client sends 5 a second."""
    requests, end_ns = play([i / 10 for i in range(50)], 200.0, in_flight=1)
    assert end_ns == 10 * NS_PER_S
    for metric in ("ttft_ms", "ttlt_ms"):
        assert quantiles_ms(metric, requests, from_intended=False) == (200.0, 200.0)
        assert quantiles_ms(metric, requests, from_intended=True) == (2600.0, 5100.0)
    delays = sorted(d for r in requests if (d := schedule_delay_ms(r)) is not None)
    assert (quantile(delays, 0.5), quantile(delays, 0.99), delays[-1]) == (2400.0, 4900.0, 4900.0)
    told = summarize(requests, mode="open", offered_qps=10.0).as_json()
    assert (told["schedule_delay_ms"]["p50"], told["schedule_delay_ms"]["max"]) == (2400.0, 4900.0)
    assert (told["ttlt_ms"]["p50"], told["response_ttlt_ms"]["p50"], told["arrival_qps"]) == (200.0, 2600.0, 10.0)
    assert any("schedule not honoured: sent 50.0% of the rate" in why for why in checked(requests).void)


def test_a_freeze_counts_for_everybody_who_would_have_come_meanwhile() -> None:
    """2,000 requests/s over 100 connections, and 1.4 s in which the server does nothing (the example of wrk2): whoever
    counts from the send sees at most a hundred slow requests, which is no percent."""
    frozen = (5.0, 6.4)
    requests, _ = play([i / 2000 for i in range(30_900)], 6.0, in_flight=100, frozen_s=frozen)
    told = summarize(requests, mode="open", offered_qps=2000.0)
    assert told.ttlt_ms.p99 == 6.0
    assert told.response_ttlt_ms is not None and told.response_ttlt_ms.p99 == pytest.approx(1270.0, abs=5.0)
    assert told.response_ttlt_ms.max == pytest.approx(1400.0, abs=6.0)
    assert sum(r.t_end_ns - r.t_send_ns > 7 * NS_PER_MS for r in requests) <= 100
    assert told.response_ttft_ms is not None and told.response_ttft_ms.p99 == told.response_ttlt_ms.p99


def test_bundled_frames_have_no_inter_token_latency_of_their_gaps() -> None:
    """Frames of four tokens at 100, 140, 180 and 220 ms; only the total is told."""
    reader = StreamReader()
    frame = b'data: {"choices":[{"index":0,"delta":{"content":" w x y z"}}]}\n\n'
    for t_ms in (100, 140, 180, 220):
        reader.feed(t_ms * NS_PER_MS, frame)
    reader.feed(220 * NS_PER_MS, b'data: {"choices":[],"usage":{"completion_tokens":16}}\n\ndata: [DONE]\n\n')
    read = reader.finish()
    timing = RequestTiming(
        *("r", 0, 0, 0, 220 * NS_PER_MS, read.chunks, 10, read.num_output_tokens),
        t_first_answer_ns=read.t_first_answer_ns,
    )
    assert icl_ms(timing) == [40.0] * 3
    assert tpot_ms(timing) == 120 / 12
    assert itl_ms(timing) == [10.0] * 12
    told = summarize([timing] * 20, mode="open").as_json()
    assert told["tokens_per_chunk"] == 4.0
    # What holds the wait for the first token is another number: it must not be ours under any name.
    (other,) = [n for n in compat_view("llmperf", [timing]).numbers if n.name == "inter-token latency"]
    assert other.mean == pytest.approx(220 / 4)
    ours = [told[name]["mean"] for name in ("itl_ms", "tpot_ms", "icl_ms", "max_gap_ms")]
    assert ours == pytest.approx([10.0, 10.0, 40.0, 40.0])


def test_a_rate_that_was_not_delivered_voids() -> None:
    """183.5 of 200 requests/s, as sleeps between sends deliver."""

    def sent(rate: float) -> list[RequestTiming]:
        made = []
        for i in range(10_000):
            due, at = round(i / 200 * NS_PER_S), round(i / rate * NS_PER_S)
            made.append(RequestTiming("r", due, at, at, at + NS_PER_MS, (Chunk(at + NS_PER_MS, 1),), 10, 1))
        return made

    assert any("sent 91.8% of the rate asked for" in why for why in checked(sent(183.5)).void)
    assert checked(sent(200.0)).void == ()


def test_reasoning_counts_once_and_comes_first() -> None:
    """Reasoning from 100 ms to 5 s, the answer from 5 s on; `usage` counts both, and tells the reasoning again."""
    for name in ("reasoning", "reasoning_content"):
        frames = [(100 + 98 * i, {name: "hm"}) for i in range(50)]
        frames += [(5000 + 10 * i, {"content": "so"}) for i in range(5)]
        for kept in (frames, frames[:50]):
            reader = StreamReader()
            for t_ms, delta in kept:
                event = {"choices": [{"index": 0, "delta": delta}]}
                reader.feed(t_ms * NS_PER_MS, f"data: {json.dumps(event)}\n\n".encode())
            usage = {"completion_tokens": len(kept), "completion_tokens_details": {"reasoning_tokens": 50}}
            end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": usage}
            reader.feed(6 * NS_PER_S, f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())
            read = reader.finish()
            assert (read.error, read.num_output_tokens, sum(read.counts)) == (None, len(kept), len(kept))
            assert read.times_ns[0] == 100 * NS_PER_MS
            assert read.t_first_answer_ns == (5 * NS_PER_S if len(kept) > 50 else None)


class Words:
    """A tokenizer and a template in which every word is a token."""

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(int.from_bytes(word.encode(), "big") for word in text.split())

    def encode_chat(self, messages: Any) -> tuple[int, ...]:
        return self.encode_text(" ".join(f"<{m['role']}> {m['content']} </>" for m in messages) + " <assistant>")


class PrefixCache:
    """A server that has to compute only what no prompt before began with: `ms_per_token` for each such token."""

    def __init__(self, ms_per_token: float = 0.1) -> None:
        self._known: dict[int, Any] = {}
        self._ms = ms_per_token

    def answer(self, request: RenderedRequest, send_ns: int) -> RequestTiming:
        ids = Words().encode_chat(json.loads(request.body)["messages"])
        node, cached = self._known, 0
        for token in ids[:-1]:  # the last one is always computed
            cached += token in node
            node = node.setdefault(token, {})
        first = send_ns + round((len(ids) - cached) * self._ms * NS_PER_MS)
        return RequestTiming("r", send_ns, send_ns, send_ns, first, (Chunk(first, 1),), len(ids), 1, cached)


def ladder(streams: Sequence[str], cache: PrefixCache, *, reuse: float = 0.0) -> list[tuple[float, Checks]]:
    """The median TTFT of each stage and whether it may be used: 128 prompts of 1,024 tokens at twice the rate each."""
    values: dict[str, Any] = {"model": "m", "qps": 8, "input_tokens": 1024, "output_tokens": 1, "prefix_reuse": reuse}
    found = []
    for number, stream in enumerate(streams):
        workload = sample_workload(
            parse(values), seed=3, num_requests=128, qps=2.0**number, arrivals="constant", stream=stream
        )
        planned = render(workload.requests, Words(), RenderOptions("m"))
        timings = [cache.answer(r, round(r.timed.at_s * NS_PER_S)) for r in planned]
        counted = Counter({"usage": len(timings)})
        result = DriveResult(timings=timings, positions=range(128), counted_by=counted, num_telling_cache=128)
        checks = self_checks(result, timings, planned, SLO, workload.prefix_reuse)
        found.append((quantiles_ms("ttft_ms", timings, from_intended=False)[0], checks))
    return found


def test_no_stage_of_a_ladder_meets_a_cache_that_another_warmed() -> None:
    stages = ladder(["scout-1", "scout-2", "rate-3", "rate-4"], PrefixCache())
    medians = [median for median, _ in stages]
    assert medians == [medians[0]] * 4
    assert medians[0] > 100.0, "hardly a token was known"
    assert [checks.void for _, checks in stages] == [()] * 4


def test_the_same_prompts_again_are_found_out() -> None:
    first, again = ladder(["rate-1", "rate-1"], PrefixCache())
    assert first[0] > 100.0 > again[0]
    assert first[1].void == ()
    assert again[1].void == ("reuse_mismatch: 100% of the input tokens came from the cache, 0% are the workload's",)


def test_declared_reuse_is_what_a_cache_finds() -> None:
    ((_, checks),) = ladder(["rate-1"], PrefixCache(), reuse=0.5)
    assert (checks.void, checks.notes) == ((), ())


def test_failures_are_offered_requests() -> None:
    """256 requests: 6 end at 10 s, 250 time out at 60 s; or all time out; or 10 are unfinished at the cut-off."""

    def ended(at_s: float, error: str | None = None) -> RequestTiming:
        at = round(at_s * NS_PER_S)
        return RequestTiming("r", 0, 0, 0, at, () if error else (Chunk(at, 1),), 10, 1, error=error)

    few = [ended(10.0)] * 6 + [ended(60.0, "timeout")] * 250
    verdict, told = judge(Slo((Objective("ttft_ms", 0.95, 15_000.0),)), few), summarize(few, mode="burst").as_json()
    assert (verdict.verdict, verdict.goodput) == ("fail", 6 / 256)
    assert told["errors"]["rate"] == 250 / 256 == pytest.approx(0.977, abs=5e-4)
    for name in ("ttft_ms", "response_ttft_ms"):
        assert (told[name]["p95"], told[name]["infinite"]) == (None, ["p50", "p90", "p95"])
        assert told[name]["successes"]["p95"] == 10_000.0
    none = [ended(60.0, "timeout")] * 256
    verdict, told = judge(SLO, none), summarize(none, mode="burst").as_json()
    assert (verdict.verdict, verdict.goodput, told["ttft_ms"]["mean"]) == ("fail", 0.0, None)
    json.dumps([verdict.as_json(), told], allow_nan=False)
    cut = [ended(0.2)] * 246 + [ended(5.0, "censored")] * 10
    verdict, told = judge(SLO, cut), summarize(cut, mode="burst").as_json()
    assert (told["num_requests"], told["num_censored"], verdict.goodput) == (256, 10, 246 / 256)
    assert (verdict.verdict, told["ttft_ms"]["num_samples"]) == ("inconclusive", 256)


def test_the_filling_of_a_pipeline_is_no_capacity() -> None:
    """The first answer after 20 s, then one every 0.5 s, for 60 s: the search starts from 2.00, never from 1.35."""
    flood = []
    for i in range(81):
        end = round((20.0 + 0.5 * i) * NS_PER_S)
        flood.append(RequestTiming("r", None, 0, 0, end, (Chunk(end, 1),), 10, 1))
    assert achieved_rate(flood)[0] == pytest.approx(2.0)
    assert summarize(flood, mode="burst").as_json()["achieved_qps"] == pytest.approx(2.0)

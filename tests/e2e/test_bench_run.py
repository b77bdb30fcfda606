"""A whole bench run over HTTP against a served script, whose capacity is known by construction."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from inferloop.backends.protocols import LaunchSpec
from inferloop.bench.render import RenderOptions
from inferloop.bench.result import BenchResult
from inferloop.bench.search import BenchOptions, BenchProgress, run_bench
from inferloop.contract.sample import sample_workload
from inferloop.contract.workload import (
    Arrivals,
    Contract,
    Distribution,
    ModelRef,
    Rate,
    TraceSource,
    Traffic,
    TrafficClass,
)
from inferloop.core.errors import EnvironmentLacksError, UsageError
from inferloop.core.slo import Objective, Slo
from inferloop.fleet.act.process import ReplicaProcess
from inferloop.measure.timing import RequestTiming
from inferloop.measure.verdict import judge
from inferloop.records.run import RunRecord, RunWriter, open_run

OnlyBusy = Callable[[Sequence[str]], bool]
INPUT = Distribution(((0.5, 60.0), (0.95, 90.0)))
OUTPUT = Distribution(((0.5, 4.0), (0.95, 8.0)))


def contract(*, peak: float, ttft_ms: float = 5000.0, reuse: float = 0.0) -> Contract:
    return Contract(
        version=1,
        service="scripted",
        archetype="chat",
        model=ModelRef("demo"),
        traffic=Traffic(
            qps=Rate(peak / 2, peak, peak),
            arrivals=Arrivals("poisson"),
            input_tokens=INPUT,
            output_tokens=OUTPUT,
            prefix_reuse=reuse,
            classes=(TrafficClass("default", 1.0, INPUT, OUTPUT, reuse),),
        ),
        slo=Slo((Objective("ttft_ms", 0.95, ttft_ms),), max_error_rate=0.01),
    )


@contextlib.asynccontextmanager
async def scripted(tmp_path: Path, *script: str) -> AsyncIterator[str]:
    options = [word for pair in script for word in ("--script", pair)]
    argv = (
        *(sys.executable, "-m", "inferloop", "serve", "demo", "--backend", "scripted"),
        "--port",
        "{port}",
        *options,
    )
    spec = LaunchSpec(backend="scripted", argv=argv, model_id="demo")
    process = await ReplicaProcess.start_ready(spec, log_path=tmp_path / "serve.log")
    try:
        yield process.url
    finally:
        await process.stop(2.0)


FAST = BenchOptions(seed=1, budget_s=25.0, num_points=3, num_warmup=2, num_serial=6, num_burst=16, max_drain_s=3.0)


async def test_a_run_finds_the_frontier_and_judges_the_peak(tmp_path: Path) -> None:
    news: list[BenchProgress] = []
    async with scripted(tmp_path, "ttft_ms=40", "tpot_ms=8", "max_concurrency=4") as url:
        with RunWriter(tmp_path / "runs", verb="bench", service="scripted") as writer:
            result = await run_bench(contract(peak=40.0), url, None, None, FAST, writer, news.append)
            summary = writer.finish(result.as_summary())
    json.dumps(summary, allow_nan=False)
    assert [p.name for p in result.points][:2] == ["serial", "burst"]
    assert result.points[-1].name == "peak"
    assert result.judged is result.points[-1]
    serial, burst, peak = result.points[0], result.points[1], result.points[-1]
    assert burst.summary.achieved_qps is not None
    assert serial.summary.achieved_qps is not None
    assert burst.summary.achieved_qps > 2 * serial.summary.achieved_qps
    assert peak.summary.offered_qps == 40.0
    assert all(p.summary.queue_ms.num_samples for p in result.points)
    assert {p.stage for p in news} >= {"serial", "burst", "peak"}
    record = open_run(writer.path)
    assert record.complete
    assert record.header.identity is not None
    assert record.header.target == url
    for name, timings in record.points().items():
        point = next(p for p in result.points if p.name == name)
        assert len(timings) == point.summary.num_requests
    assert any(row.warmup for row in record.rows)
    _check_no_pause_after_the_warm_up(record, contract(peak=40.0))
    for t in record.timings:
        assert t.error is not None or t.num_output_tokens == sum(c.num_tokens for c in t.chunks)


def _check_no_pause_after_the_warm_up(record: RunRecord, shaped: Contract) -> None:
    """Warm-up and what is measured are one Poisson process: the first measured request falls due when it would have
    done anyhow, whatever is still in flight. Nothing is drained in between."""
    rows = [row for row in record.rows if row.point == "peak"]
    due = {warmup: [r.timing.t_intended_ns or 0 for r in rows if r.warmup == warmup] for warmup in (True, False)}
    assert due[True] and max(due[True]) < min(due[False])
    plan = sample_workload(shaped, seed=FAST.seed, stream="peak", num_requests=2000, qps=40.0).requests
    first_ns = min(due[True])
    planned = {round(r.at_s * 1e9) - round(plan[0].at_s * 1e9) for r in plan}
    assert {t - first_ns for part in due.values() for t in part} <= planned


async def test_a_service_that_misses_alone_is_not_searched(tmp_path: Path, only_busy: OnlyBusy) -> None:
    async with scripted(tmp_path, "ttft_ms=100", "tpot_ms=1") as url:
        with RunWriter(tmp_path / "runs", verb="bench", service="scripted") as writer:
            result = await run_bench(contract(peak=5.0, ttft_ms=30.0), url, None, None, FAST, writer)
            writer.finish(result.as_summary())
    if result.verdict == "void":
        assert only_busy(result.reasons)
    else:
        assert result.verdict == "fail" and "one request at a time" in result.reasons[0]
    assert [p.name for p in result.points] == ["serial"]
    assert result.capacity.qps == 0.0


async def test_an_overloaded_peak_ends_early_and_fails(tmp_path: Path, only_busy: OnlyBusy) -> None:
    options = replace(FAST, num_points=0, budget_s=60.0)
    async with scripted(tmp_path, "ttft_ms=50", "tpot_ms=20", "max_concurrency=1") as url:
        with RunWriter(tmp_path / "runs", verb="bench", service="scripted") as writer:
            result = await run_bench(contract(peak=60.0, ttft_ms=200.0), url, None, None, options, writer)
            writer.finish(result.as_summary())
    assert result.verdict == "fail" or (result.verdict == "void" and only_busy(result.reasons))
    burst = result.points[1]
    assert not burst.void or only_busy(burst.void)
    assert (burst.mode, burst.summary.num_censored) == ("burst", 0)
    assert burst.verdict in ("not judged", "void")
    assert burst.as_json()["slo"] is None
    assert any("hopeless" in note for note in result.points[-1].notes)


async def test_a_level_that_completes_less_than_it_is_given_fails(tmp_path: Path) -> None:
    """However late its queue would make an objective fail. Two at a time for 40 ms or more are 50 a second at most."""
    async with scripted(tmp_path, "ttft_ms=20", "tpot_ms=10", "max_concurrency=2", "max_waiting=100000") as url:
        with RunWriter(tmp_path / "runs", verb="bench", service="scripted") as writer:
            options = replace(FAST, num_points=2, budget_s=20.0, max_drain_s=60.0)
            result = await run_bench(contract(peak=120.0, ttft_ms=60_000.0), url, None, None, options, writer)
            summary = writer.finish(result.as_summary())
    peak = result.points[-1]
    assert peak.name == "peak" and peak.slo.balance is not None
    assert (peak.slo.balance.verdict, peak.slo.verdict) == ("saturated", "fail")
    assert [o.verdict for o in peak.slo.objectives] == ["pass"], "its latency alone would pass"
    assert "the queue grows" in peak.slo.reasons[0]
    assert summary["points"][-1]["balance"]["verdict"] == "saturated"
    assert "the queue grows" in summary["points"][-1]["balance"]["reason"]
    for point in result.points:
        assert point.slo.verdict != "pass" or point.offered_qps is None or point.offered_qps < 60, point.name


async def test_failing_requests_fail_the_verdict(tmp_path: Path, only_busy: OnlyBusy) -> None:
    options = replace(FAST, num_points=0)
    async with scripted(tmp_path, "ttft_ms=5", "tpot_ms=1", "error_rate=0.2", "seed=3") as url:
        with RunWriter(tmp_path / "runs", verb="bench", service="scripted") as writer:
            result = await run_bench(contract(peak=60.0), url, None, None, options, writer)
            writer.finish(result.as_summary())
    assert result.judged is not None
    assert result.verdict == "fail" or (result.verdict == "void" and only_busy(result.reasons))
    assert result.judged.slo.verdict == "fail"
    assert result.judged.summary.errors["by_class"]["truncated"] > 0


async def test_a_slow_peak_does_not_outlast_the_budget(tmp_path: Path, only_busy: OnlyBusy) -> None:
    options = replace(FAST, num_points=0, num_warmup=1, num_serial=2, num_burst=4, budget_s=4.0)
    async with scripted(tmp_path, "ttft_ms=5", "tpot_ms=1") as url:
        with RunWriter(tmp_path / "runs", verb="bench", service="scripted") as writer:
            result = await run_bench(contract(peak=0.5), url, None, None, options, writer)
            writer.finish(result.as_summary())
    assert result.verdict == "inconclusive" or (result.verdict == "void" and only_busy(result.reasons))
    assert result.judged is not None
    assert result.judged.summary.num_requests < 15
    assert any("out of time" in note for note in result.judged.notes)


async def test_cancelling_leaves_a_readable_run_and_no_task(tmp_path: Path) -> None:
    async with scripted(tmp_path, "ttft_ms=20", "tpot_ms=5") as url:

        async def run() -> None:
            with RunWriter(tmp_path / "runs", verb="bench", service="scripted") as writer:
                folder.append(writer.path)
                await run_bench(contract(peak=10.0), url, None, None, FAST, writer, lambda _: recorded.set())

        folder: list[Path] = []
        recorded = asyncio.Event()
        task = asyncio.create_task(run())
        await recorded.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    record = open_run(folder[0])
    assert (record.status, record.complete) == ("interrupted", False)
    assert record.rows
    assert record.stages[-1].event == "failed"


async def test_a_target_that_is_none_is_refused(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "runs", verb="bench", service="scripted") as writer:
        with pytest.raises(EnvironmentLacksError, match="does not answer"):
            await run_bench(contract(peak=5.0), "http://127.0.0.1:9", None, None, FAST, writer)
        async with scripted(tmp_path) as url:
            with pytest.raises(UsageError, match="did you mean demo"):
                await run_bench(contract(peak=5.0), url, "demos", None, FAST, writer)


def test_the_body_is_for_the_right_path() -> None:
    assert RenderOptions("m").path == "/v1/chat/completions"
    assert RenderOptions("m", as_token_ids=True).path == "/v1/completions"


async def run_with(tmp_path: Path, shaped: Contract, options: BenchOptions = FAST) -> tuple[BenchResult, RunRecord]:
    async with scripted(tmp_path, "ttft_ms=5", "tpot_ms=1", "max_concurrency=16") as url:
        with RunWriter(tmp_path / "runs", verb="bench", service="scripted") as writer:
            result = await run_bench(shaped, url, None, None, options, writer)
            writer.finish(result.as_summary())
    return result, open_run(writer.path)


async def test_a_trace_is_one_point_with_its_own_times_and_lengths(tmp_path: Path, only_busy: OnlyBusy) -> None:
    rows = [(i * 20, 300 + i, 2 + i % 5, [1 if i % 2 else 2]) for i in range(150)]
    lines = [{"timestamp": t, "input_length": n, "output_length": m, "hash_ids": ids} for t, n, m, ids in rows]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flow = contract(peak=40.0).traffic
    source = TraceSource("trace.jsonl", str(tmp_path / "trace.jsonl"), time_scale=0.5)
    shaped = replace(contract(peak=40.0), traffic=replace(flow, arrivals=Arrivals("trace", trace=source)))
    result, record = await run_with(tmp_path, shaped)
    assert [p.name for p in result.points] == ["serial", "burst", "trace"]
    assert result.judged is result.points[-1] and result.judged.offered_qps == pytest.approx(100.0)
    sent = sorted(record.points()["trace"], key=lambda t: t.t_intended_ns or 0)
    void = result.judged.void
    assert result.verdict == ("void" if void else judge(shaped.slo, sent).verdict)
    lengths = [(t.num_input_tokens, t.num_output_tokens) for t in sent]
    if void:  # a client that stalls gives up what it is too late for
        assert only_busy(void) and set(lengths) <= {(n, m) for _, n, m, _ in rows}
        return
    assert lengths == [(n, m) for _, n, m, _ in rows]
    first = sent[0].t_intended_ns or 0
    assert [(t.t_intended_ns or 0) - first for t in sent] == [t * 500_000 for t, *_ in rows]


async def test_users_who_wait_are_one_point(tmp_path: Path) -> None:
    think = Distribution(((0.5, 20.0),))
    flow = replace(contract(peak=40.0).traffic, arrivals=Arrivals("closed", users=4, think_ms=think))
    result, record = await run_with(tmp_path, replace(contract(peak=40.0), traffic=flow))
    assert [p.name for p in result.points] == ["serial", "burst", "closed"]
    timings = record.points()["closed"]
    assert len(timings) > 100 and all(t.t_intended_ns is None for t in timings), "lateness has no meaning"
    overlap = [sum(a.t_send_ns <= b.t_send_ns < a.t_end_ns for a in timings) for b in timings]
    assert max(overlap) <= 4


async def test_conversations_grow_over_http(tmp_path: Path, only_busy: OnlyBusy) -> None:
    flow = replace(
        contract(peak=40.0, reuse=0.4).traffic,
        turns=Distribution(((0.5, 3.0),)),
        think_ms=Distribution(((0.5, 10.0),)),
    )
    result, record = await run_with(
        tmp_path, replace(contract(peak=40.0), traffic=flow), replace(FAST, num_points=0, budget_s=20.0)
    )
    peak = result.points[-1]
    assert not peak.void or only_busy(peak.void)
    talks: dict[int, list[RequestTiming]] = {}
    for row in record.rows:
        if row.point == "peak" and row.timing.session is not None:
            talks.setdefault(row.timing.session, []).append(row.timing)
    whole = [sorted(t, key=lambda x: x.turn or 0) for t in talks.values() if len(t) == 3]
    assert len(whole) > 10
    for turns in whole:
        assert [t.num_turns for t in turns] == [3, 3, 3]
        for before, after in pairwise(turns):
            assert after.num_input_tokens >= before.num_input_tokens
            assert after.t_intended_ns == before.t_end_ns + 10_000_000

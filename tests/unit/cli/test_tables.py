"""What people read: whole at 80 columns, no exponents."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from inferloop.bench.result import BenchPoint
from inferloop.cli import tables
from inferloop.contract.load import parse
from inferloop.measure.summary import summarize
from inferloop.measure.verdict import judge

SLO = parse({"model": "m", "qps": 1, "input_tokens": 10, "output_tokens": 10, "slo": {"ttft_p95_ms": 1000}}).slo


def slow_point(name: str) -> BenchPoint:
    empty = summarize([], mode="open")
    summary = replace(
        empty,
        num_requests=1440,
        achieved_qps=1234.5,
        output_tok_s=2440.4,
        ttft_ms=replace(empty.ttft_ms, p50=1140.2, p95=12345.6),
        tpot_ms=replace(empty.tpot_ms, p50=169.2, p95=1688.8),
        ttlt_ms=replace(empty.ttlt_ms, p95=37540.0),
        errors={"rate": 1.0, "by_class": {}},
    )
    return BenchPoint(name, "open", 1234.5, summary, judge(SLO, []), (), (), 0, 1.0)


@pytest.mark.parametrize("width", [80, 140])
def test_a_slow_and_busy_frontier_is_shown_whole(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    monkeypatch.setattr(tables, "stdout", console)
    console.print(tables.frontier_table([slow_point("sweep-10")]))
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in told and "e+" not in told
    row = told.splitlines()[-1].split()
    assert row == [
        "sweep-10",
        "1234",
        "1234",
        "1440",
        "2440",
        "1140",
        "12346",
        "169",
        "1689",
        "37540",
        "100.0%",
        "-",
        "inconclusive",
    ]


@pytest.mark.parametrize("width", [80, 140])
def test_users_latencies_and_goodput_are_shown_whole(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    monkeypatch.setattr(tables, "stdout", console)
    point = slow_point("sweep-10")
    s = point.summary
    late = replace(s.ttft_ms, p50=2140.0, p95=22345.0)
    summary = replace(s, response_ttft_ms=late, response_ttfat_ms=late, response_ttlt_ms=s.ttlt_ms, icl_ms=s.tpot_ms,
                      itl_ms=replace(s.itl_ms, p95=422.2), tokens_per_chunk=4.0)  # fmt: skip
    slo = replace(point.slo, goodput=0.234, goodput_qps=288.9)
    table = tables.response_table([replace(point, summary=summary, slo=slo), replace(point, mode="serial")])
    assert table is not None
    console.print(table)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in told and "e+" not in told
    assert told.splitlines()[-1].split() == [
        "sweep-10", "2140", "22345", "22345", "37540", "1689", "422", "4", "23.4%", "289"
    ]  # fmt: skip
    assert tables.response_table([replace(point, mode="burst")]) is None


def test_conversations_are_told_where_there_were_some(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=80)
    point = slow_point("peak")
    assert tables.sessions_table(point) is None and tables.sessions_table(None) is None
    times = replace(summarize([], mode="open").ttft_ms, num_samples=11, p50=3806.9, mean=3970.8, max=8564.9)
    table = tables.sessions_table(replace(point, summary=replace(point.summary, session_ms=times)))
    assert table is not None
    console.print(table)
    assert console.file.getvalue().splitlines()[-1].split() == ["11", "3807", "-", "3971", "8565"]  # type: ignore[attr-defined]

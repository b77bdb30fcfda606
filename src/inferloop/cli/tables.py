"""Results as tables for people: the frontier, the objectives, the gates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table

from inferloop.bench.result import BenchPoint, BenchResult
from inferloop.cli.common import stdout
from inferloop.cli.gates import Gate
from inferloop.core.units import figure
from inferloop.measure.summary import Latency

_ROOMY = 92
"""Columns from which the frontier has room for wider gaps."""
_COLOURS = {"pass": "green", "fail": "red", "void": "red", "inconclusive": "yellow", "not declared": "dim"}

_QUEUE = {"saturated": "+", "sustained": "=", "undecided": "?"}
"""What arrivals against completions say; a question mark where the window is too short."""


def coloured(verdict: str) -> str:
    """A verdict with its colour, for rich."""
    colour = _COLOURS.get(verdict)
    return f"[{colour}]{verdict}[/]" if colour else escape(verdict)


def notes_of(result: BenchResult) -> list[str]:
    """What was noted of a measurement, and of the level that is judged; each once."""
    return list(dict.fromkeys([*result.notes, *(result.judged.notes if result.judged else ())]))


def frontier_table(points: Sequence[BenchPoint]) -> Table:
    """One row per load level, in the order in which they were measured."""
    table = _table(
        "Frontier of one replica (ms; a dash: too few requests to certify it; q: the queue + grows, = holds)"
    )
    table.padding = (0, 2 if stdout.width >= _ROOMY else 1, 0, 0)
    columns = ("point", "offered/s", "done/s", "n", "tok/s", "TTFT p50", "p95", "TPOT p50", "p95", "TTLT p95", "errors")
    for name in columns:
        table.add_column(name.replace(" ", "\n").replace("/", "\n/"), justify="left" if name == "point" else "right")
    table.add_column("q")
    table.add_column("verdict", no_wrap=True)
    for p in points:
        s = p.summary
        table.add_row(
            p.name,
            _number(p.offered_qps),
            _number(s.achieved_qps),
            str(s.num_requests),
            _number(s.output_tok_s),
            *_latency(s.ttft_ms, "p50", "p95"),
            *_latency(s.tpot_ms, "p50", "p95"),
            *_latency(s.ttlt_ms, "p95"),
            "-" if s.errors["rate"] is None else f"{s.errors['rate']:.1%}",
            "-" if p.slo.balance is None else _QUEUE[p.slo.balance.verdict],
            coloured(p.verdict),
        )
    return table


def response_table(points: Sequence[BenchPoint]) -> Table | None:
    """What users of an open system meet, beside what the frontier tells of the service alone: latencies from the
    intended instant, first answers, chunks, goodput. None without an open load level."""
    opened = [p for p in points if p.mode == "open"]
    if not opened:
        return None
    table = _table("As users met it (ms from the intended instant)")
    table.padding = (0, 2 if stdout.width >= _ROOMY else 1, 0, 0)
    for name in (
        "point",
        "TTFT p50",
        "p95",
        "answer p95",
        "TTLT p95",
        "ICL p95",
        "ITL p95",
        "tok /chunk",
        "good",
        "good /s",
    ):
        table.add_column(name.replace(" ", "\n"), justify="left" if name == "point" else "right")
    for p in opened:
        s = p.summary
        table.add_row(
            p.name,
            *_latency(s.response_ttft_ms, "p50", "p95"),
            *_latency(s.response_ttfat_ms, "p95"),
            *_latency(s.response_ttlt_ms, "p95"),
            *_latency(s.icl_ms, "p95"),
            *_latency(s.itl_ms, "p95"),
            _number(s.tokens_per_chunk),
            "-" if p.slo.goodput is None else f"{p.slo.goodput:.1%}",
            _number(p.slo.goodput_qps),
        )
    return table


def sessions_table(point: BenchPoint | None) -> Table | None:
    """Whole conversations and tool loops of the judged point. None where there were none."""
    found = None if point is None else point.summary.session_ms
    if found is None:
        return None
    table = _table("Conversations, first question to last answer, ms")
    for name in ("n", "p50", "p95", "mean of those that ended", "longest"):
        table.add_column(name, justify="right")
    table.add_row(str(found.num_samples), *_latency(found, "p50", "p95"), _number(found.mean), _number(found.max))
    return table


def slo_table(point: BenchPoint) -> Table:
    """One row per objective of the judged point, and one for the error rate when it is declared."""
    slo = point.slo
    table = _table(f"Objectives at the point `{point.name}`" if point.name != "peak" else "Objectives at the peak")
    for name in ("objective", "verdict", "why"):
        table.add_column(name, overflow="fold")
    for found in slo.objectives:
        table.add_row(escape(found.objective.label), coloured(found.verdict), escape(_rest(found.reason)))
    if slo.errors.verdict != "not declared":
        table.add_row("errors", coloured(slo.errors.verdict), escape(slo.errors.reason))
    return table


def gates_table(gates: Iterable[Gate]) -> Table:
    table = _table("Gates")
    for name in ("gate", "verdict", "why"):
        table.add_column(name, overflow="fold")
    for gate in gates:
        table.add_row(gate.name, coloured(gate.verdict), escape(gate.reason))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")


def _number(value: float | None) -> str:
    """A rate or milliseconds."""
    return "-" if value is None else figure(value)


def _latency(latency: Latency | None, *names: str) -> list[str]:
    return [_number(None if latency is None else getattr(latency, name)) for name in names]


def _rest(reason: str) -> str:
    """Without the objective's name, which its row says already."""
    label, colon, rest = reason.partition(": ")
    return rest if colon and "<=" in label else reason

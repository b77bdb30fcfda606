"""A merged run's summary: every number taken anew from the joined rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferloop.bench.result import BenchPoint, BenchResult, frontier_of, saturated
from inferloop.core.slo import Objective, Slo
from inferloop.core.units import NS_PER_S
from inferloop.measure.balance import balance_of
from inferloop.measure.summary import Mode, summarize
from inferloop.measure.verdict import judge
from inferloop.records.header import RunHeader
from inferloop.records.merge import Merged, PointParts
from inferloop.records.read import RunRecord

_LEAST_OVERLAP = 0.8
"""Of the sends of an open point: below, the service did not carry the sum of the loads for most of the time."""


def merged_summary(merged: Merged, runs: Sequence[RunRecord]) -> dict[str, Any]:
    """What `inferloop bench` writes of a run. Rates that were offered are added up; `runs` are those merged."""
    slo = _slo(merged.header)
    timings = merged.timings()
    points = []
    for part in merged.points:
        rows = timings[part.name]
        if not rows:
            continue  # warm-up alone
        told = [p for run in runs for p in (run.summary or {}).get("points", ()) if p.get("name") == part.name]
        offered = [p["offered_qps"] for p in told if p.get("offered_qps") is not None]
        mode: Mode = told[0]["mode"] if told else "open"
        summary = summarize(rows, mode=mode, offered_qps=sum(offered) if offered else None)
        slo_verdict = judge(slo, rows)
        if any(p.get("balance") for p in told):
            everything = [row.timing for row in merged.rows if row.point == part.name]
            slo_verdict = slo_verdict.of_load(balance_of(everything, since_ns=min(r.t_send_ns for r in rows)))
        span_ns = max(r.t_end_ns for r in rows) - min(r.t_send_ns for r in rows)
        points.append(
            BenchPoint(
                name=part.name,
                mode=mode,
                offered_qps=summary.offered_qps,
                summary=summary,
                slo=slo_verdict,
                void=_void(part, told, mode, len(runs)),
                notes=tuple(dict.fromkeys(note for p in told for note in p.get("notes", ()))),
                num_warmup=sum(row.warmup and row.point == part.name for row in merged.rows),
                elapsed_s=span_ns / NS_PER_S,
            )
        )
    name = next((run.summary.get("judged_point") for run in runs if run.summary), None)
    judged = next((p for p in points if p.name == name), None)
    frontier = frontier_of(points)
    capacity = frontier.capacity() if slo.objectives else saturated(points)
    verdict = judged.verdict if judged is not None and judged.verdict != "not judged" else "not declared"
    reasons = (judged.void or judged.slo.reasons) if judged is not None else ("no point was judged",)
    result = BenchResult(tuple(points), frontier, capacity, verdict, reasons, merged.notes, judged)
    return {**result.as_summary(), "merged": merged.header.merged}


def _void(part: PointParts, told: Sequence[Mapping[str, Any]], mode: str, num_runs: int) -> tuple[str, ...]:
    found = [text for point in told for text in point.get("void", ())]
    if mode == "open" and len(part.runs) < num_runs:
        found.append(f"{len(part.runs)} of the {num_runs} runs have this point")
    if mode == "open" and part.overlap < _LEAST_OVERLAP:
        found.append(f"the runs were sending together for {part.overlap:.0%} of the time: that is not one load")
    return tuple(dict.fromkeys(found))


def _slo(header: RunHeader) -> Slo:
    """The objectives as the header tells them; none without a contract."""
    told = (header.contract or {}).get("slo")
    if not told:
        return Slo()
    return Slo(
        **{
            **told,
            "objectives": tuple(Objective(**o) for o in told.get("objectives", ())),
            "scope": tuple(told.get("scope", ())),
        }
    )

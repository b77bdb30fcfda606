"""The objectives of a run and how each fared, read from summary.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from inferloop.core.slo import Objective
from inferloop.pages.html import Child, Column, table, tag
from inferloop.pages.text import ABSENT, METRICS, number, percent, verdict

Json = Mapping[str, Any]


def mapping(value: Any) -> Json:
    """A mapping, or an empty one: old and partial records have holes."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: Any) -> list[Json]:
    """The mappings of a list, or none."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return []
    return [item for item in value if isinstance(item, Mapping)]


def slo_of(summary: Json) -> Json:
    """The joint verdict that the run was judged by: its own, else that of `judged_point`."""
    point = judged_point(summary)
    return mapping(summary.get("slo") or (point or {}).get("slo"))


def is_void(point: Json) -> bool:
    """A self-check of this point failed: its numbers must not be used."""
    return bool(point.get("void")) or point.get("verdict") == "void"


def judged_point(summary: Json) -> Json | None:
    """The point that the run names; else the one with the highest load that passes, else with the lowest load."""
    wanted = summary.get("judged_point")
    named = [p for p in mappings(summary.get("points")) if p.get("name") == wanted]
    if wanted is not None and named:
        return named[0]
    judged = [p for p in mappings(summary.get("points")) if p.get("slo") and not is_void(p)]
    passing = [p for p in judged if mapping(p["slo"]).get("verdict") == "pass"]
    if passing:
        return max(passing, key=_load)
    return min(judged, key=_load, default=None)


def _load(point: Json) -> float:
    for name in ("offered_qps", "achieved_qps"):
        if number(point.get(name)) != ABSENT:
            return float(point[name])
    return 0.0


def declared(summary: Json, header: Json) -> list[tuple[str, str, float]]:
    """(metric, label, limit in ms) of each latency objective, from the contract, else from the verdicts."""
    slo = mapping(mapping(header.get("contract")).get("slo"))
    found = mappings(slo.get("objectives"))
    if not found:
        found = [mapping(o.get("objective")) for o in mappings(slo_of(summary).get("objectives"))]
    return [(o["metric"], label(o), float(o["limit"])) for o in found if _whole(o)]


def label(objective: Json) -> str:
    """`TTFT p95 <= 450 ms`, with a sign that people write."""
    metric = str(objective["metric"])
    text = Objective(metric, float(objective["quantile"]), float(objective["limit"])).label
    _, _, rest = text.partition(" ")
    return f"{METRICS.get(metric, metric)} {rest}".replace("<=", "\u2264")


def slo_table(slo: Json) -> Markup:
    """One row per objective: declared, observed, samples, verdict, reason."""
    rows: list[list[Child]] = []
    for found in mappings(slo.get("objectives")):
        objective = mapping(found.get("objective"))
        observed = found.get("observed")
        rows.append(
            [
                label(objective) if _whole(objective) else ABSENT,
                verdict(found.get("verdict")),
                "\u221e"
                if found.get("infinite")
                else ABSENT
                if number(observed) == ABSENT
                else f"{number(observed)} ms",
                _why(found),
            ]
        )
    errors = mapping(slo.get("errors"))
    if errors:
        limit = errors.get("limit")
        rows.append(
            [
                "errors" if limit is None else f"errors \u2264 {percent(limit)}",
                verdict(errors.get("verdict")),
                percent(errors.get("rate")),
                _why(errors),
            ]
        )
    if not rows:
        return tag("p", "The contract declares no objective, so there is nothing to pass.")
    columns = [Column("Objective"), Column("Verdict"), Column("Observed", True), Column("Why", wide=True)]
    return table("Each objective with what was observed", columns, rows, hide_caption=True)


def _why(found: Json) -> str:
    """The reason without the objective's name, which the row already says."""
    reason = str(found.get("reason") or "")
    start, colon, rest = reason.partition(": ")
    return rest if colon and ("<=" in start or start == "error rate") else reason


def _whole(objective: Json) -> bool:
    return isinstance(objective.get("metric"), str) and all(
        number(objective.get(name)) != ABSENT for name in ("quantile", "limit")
    )

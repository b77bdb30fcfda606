"""What was measured under load: the points, their percentiles, their errors."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from inferloop.pages.html import Child, Column, grouped_table, table, tag
from inferloop.pages.text import ABSENT, METRICS, error_class, number, percent, percentile, verdict
from inferloop.pages.verdicts import Json, mapping

_PERCENTILES = ("p50", "p95", "p99")
_FIRST = tuple(METRICS[m] for m in ("ttft_ms", "tpot_ms", "ttlt_ms"))
"""What most readers look for; the other latencies are folded below."""


def point_name(point: Json) -> str:
    """`rate-5, 2.5/s` or `serial`: what notes and records call it, with the rate offered."""
    name = str(point.get("name") or point.get("mode") or "point")
    offered = number(point.get("offered_qps"))
    return name if offered == ABSENT else f"{name}, {offered}/s"


def points_table(points: Sequence[Json]) -> Markup:
    """One row per point."""
    judged = any(_verdict(p) for p in points)
    balanced = any(p.get("balance") for p in points)
    rows: list[list[Child]] = []
    for p in points:
        row: list[Child] = [
            point_name(p),
            number(p.get("achieved_qps")),
            number(p.get("num_requests")),
            number(p.get("output_tok_s")),
            percent(mapping(p.get("errors")).get("rate")),
            number(p.get("num_censored")),
            "yes" if p.get("certified") else "no",
        ]
        if balanced:
            row.append(_queue(mapping(p.get("balance"))))
        rows.append([*row, verdict(_verdict(p))] if judged else row)
    columns = [
        Column("Load offered"),
        Column("Achieved/s", True),
        Column("Requests", True),
        Column("Output tok/s", True),
        Column("Errors", True),
        Column("Unfinished", True),
        Column("p95 certified", True),
    ]
    if balanced:
        columns.append(Column("Queue: arrivals, completions/s"))
    return table("Load points, in the order in which they ran", [*columns, Column("SLO")] if judged else columns, rows)


def _queue(balance: Json) -> Child:
    """Short, so that it stays on its line where the page is narrow."""
    if not balance:
        return ABSENT
    arrived, completed = number(balance.get("arrived_qps")), number(balance.get("completed_qps"))
    verdict = _QUEUES.get(str(balance.get("verdict")), ABSENT)
    return tag("span", f"{verdict}: {arrived}, {completed}", class_="nowrap", title=str(balance.get("reason") or ""))


_QUEUES = {"saturated": "grows", "sustained": "holds", "undecided": "unclear"}


def percentiles_table(points: Sequence[Json]) -> Markup:
    """A group per latency, one row per point. Nulls say how many more requests they would need."""
    groups: list[tuple[str | None, list[list[Child]]]] = []
    for metric, name in METRICS.items():
        rows: list[list[Child]] = []
        for point in points:
            latency = mapping(point.get(metric))
            if latency.get("num_samples") or latency.get("mean") is not None:
                cells = [percentile(latency, p) for p in _PERCENTILES]
                rows.append([point_name(point), number(latency.get("mean")), *cells])
        if rows:
            groups.append((name, rows))
    columns = [Column("ms"), Column("mean", True), *(Column(p, True) for p in _PERCENTILES)]
    caption = "Failures count as infinitely slow in the percentiles; the mean is over successes alone. "
    caption += "\u201cn more needed\u201d: requests that are missing to certify a percentile"
    first = [g for g in groups if g[0] in _FIRST] or groups
    rest = [g for g in groups if g not in first]
    more = tag("details", tag("summary", f"{len(rest)} more latencies"), grouped_table(caption, columns, rest))
    return grouped_table(caption, columns, first) + (more if rest else Markup())


def stutter_table(points: Sequence[Json]) -> Markup | None:
    """How many answers stop where a reader notices. None for runs that did not record it."""
    rows: list[list[Child]] = []
    for p in points:
        seen = mapping(p.get("stutter"))
        if seen:
            shares = [percent(seen.get(name)) for name in ("gap_share", "expected", "observed")]
            rows.append([point_name(p), number(seen.get("num_answers")), number(seen.get("num_gaps_median")), *shares])
    if not rows:
        return None
    stall = number(next(mapping(p["stutter"]).get("stall_ms") for p in points if p.get("stutter")))
    columns = [
        Column("Load"),
        Column("Answers", True),
        Column("Gaps per answer T", True),
        Column("Slow gaps p", True),
        Column("1\u2212(1\u2212p)^T", True),
        Column("Answers that stalled", True),
    ]
    return table(f"Stutter: pauses of more than {stall} ms between chunks", columns, rows)


def errors_table(points: Sequence[Json]) -> Markup:
    """Requests that did not succeed, by class and point."""
    rows: list[list[Child]] = [
        [error_class(name), point_name(p), number(count)]
        for p in points
        for name, count in mapping(mapping(p.get("errors")).get("by_class")).items()
    ]
    if not rows:
        return tag("p", "Every request succeeded.")
    return table("Requests that did not succeed", [Column("Class"), Column("Load"), Column("Requests", True)], rows)


def _verdict(point: Json) -> object:
    return point.get("verdict") or mapping(point.get("slo")).get("verdict")

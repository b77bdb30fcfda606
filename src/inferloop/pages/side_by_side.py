"""Two runs side by side: what was not the same first, then what differs at the rates that both measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inferloop.measure.bootstrap import BlockBootstrap
from inferloop.measure.columns import Columns
from inferloop.measure.paired import FIGURES, difference_interval
from inferloop.measure.timing import RequestTiming
from inferloop.pages.chart import DRAW, bokeh_script
from inferloop.pages.charts import several_frontiers
from inferloop.pages.compare import figure_name, interval_text, signed
from inferloop.pages.document import document
from inferloop.pages.html import Child, Column, grouped_table, section, table, tag
from inferloop.pages.points import point_name
from inferloop.pages.text import ABSENT, number, verdict
from inferloop.pages.timing import pick_streams, timing_script, timing_simulator
from inferloop.pages.verdicts import Json, declared, is_void, mapping, mappings

_CONDITIONS = ("contract_digest", "target", "seed", "arrivals", "host")


def render_side_by_side(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of two runs by name, each as pages.report.render_report takes it, with `points`. Points that are void
    are left out."""
    (a, one), (b, other) = runs.items()
    headers = [mapping(run.get("header")) for run in (one, other)]
    sound = {
        name: [p for p in mappings(mapping(run.get("summary")).get("points")) if not is_void(p)]
        for name, run in runs.items()
    }
    charts = several_frontiers(sound, declared(mapping(one.get("summary")), headers[0]))
    parts: list[tuple[str, str, Child]] = [("unlike", "What was not the same", _unlike(headers, (one, other), (a, b)))]
    parts.append(("differences", "At the same rates", _differences(sound, runs)))
    parts.append(("frontier", "Frontier", tag("div", [c.html() for c in charts], class_="charts")))
    streams = pick_streams({name: run.get("requests") or () for name, run in runs.items()})
    if streams:
        parts.append(("timing", "Token timing", timing_simulator(streams)))
    names = [tag("li", f"{name}: {h.get('run')}") for name, h in zip(runs, headers, strict=True)]
    body: list[Child] = [
        tag("header", tag("h1", "Two runs side by side"), tag("ul", names), class_="page"),
        tag("main", [section(anchor, title, content) for anchor, title, content in parts]),
    ]
    scripts = ([bokeh_script(), DRAW] if charts else []) + ([timing_script()] if streams else [])
    return document("Two runs: inferloop report", body, scripts=scripts)


def _unlike(headers: Sequence[Json], runs: Sequence[Mapping[str, Any]], names: tuple[str, str]) -> Child:
    told: list[dict[str, object]] = []
    for header, run in zip(headers, runs, strict=True):
        found: dict[str, object] = {key: header.get(key) for key in _CONDITIONS}
        found |= _flat("contract", {k: v for k, v in mapping(header.get("contract")).items() if k != "source"})
        for part in ("identity", "fingerprint"):
            found |= {f"{part}: {key}": value for key, value in mapping(header.get(part)).items()}
        definitions = mapping(mapping(run.get("summary")).get("definitions"))
        told.append(found | {f"definition: {key}": value for key, value in definitions.items()})
    keys = [key for key in {**told[0], **told[1]} if told[0].get(key) != told[1].get(key)]
    if not keys:
        return tag("p", "Contract, target, identity, machine and definitions are the same.")
    rows: list[list[Child]] = [[key, *(_short(t.get(key)) for t in told)] for key in keys]
    return table("Conditions that differ between the runs", [Column(""), *(Column(n, wide=True) for n in names)], rows)


def _flat(name: str, value: object) -> dict[str, object]:
    """`contract.traffic.qps.peak` and its value, for every leaf."""
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    found: dict[str, object] = {}
    for key, inner in value.items():
        found |= _flat(f"{name}.{key}", inner)
    return found


def _differences(sound: Mapping[str, Sequence[Json]], runs: Mapping[str, Mapping[str, Any]]) -> Child:
    """The longest points of the same load, figure by figure; each run resampled by itself."""
    (a, points), (b, others) = ((name, _longest(found)) for name, found in sound.items())
    groups: list[tuple[str | None, list[list[Child]]]] = []
    for load in sorted(points.keys() & others.keys(), key=lambda load: (load[1] is not None, load[1] or 0.0)):
        p, q = points[load], others[load]
        requests = [_rows(runs[name], point) for name, point in ((a, p), (b, q))]
        rows: list[list[Child]] = []
        for figure in FIGURES:
            metric = figure.name.partition(" ")[0]
            one, other = (mapping(point.get(metric)).get(figure.percentile or "") for point in (p, q))
            if isinstance(one, int | float) and isinstance(other, int | float):
                found = _interval(figure, *requests)
                rows.append(
                    [figure_name({"figure": figure.name}), number(one), number(other), signed(other - one), found]
                )
        if rows:
            names = " and ".join(dict.fromkeys(point_name(point) for point in (p, q)))
            groups.append((names, rows))
    if not groups:
        return tag("p", "The runs have no load in common.")
    columns = [Column("Figure"), *(Column(t, True) for t in (a, b, "Difference", "95 % interval"))]
    note = "Each run is resampled by itself: what else changed between the runs is not in the intervals."
    return tag("div", tag("p", note), grouped_table("The second run less the first", columns, groups), _verdicts(runs))


def _verdicts(runs: Mapping[str, Mapping[str, Any]]) -> Child:
    told: list[Child] = []
    for name, run in runs.items():
        told += [f"{name}: ", verdict(mapping(run.get("summary")).get("verdict")), " "]
    return tag("p", told)


def _interval(figure: Any, a: Sequence[RequestTiming], b: Sequence[RequestTiming]) -> str:
    sides = [Columns.of(rows) for rows in (a, b)]
    made = [BlockBootstrap.of(np.asarray(c.send), seed=seed) for seed, c in enumerate(sides)]
    if made[0] is None or made[1] is None:
        return ABSENT
    found = difference_interval(figure, sides[0], sides[1], made[0], made[1])
    return ABSENT if found is None else interval_text(found.as_json())


def _longest(points: Sequence[Json]) -> dict[tuple[str, float | None], Json]:
    """Of the points of a run at one load, the one with the most requests."""
    found: dict[tuple[str, float | None], Json] = {}
    for point in points:
        load = str(point.get("mode")), point.get("offered_qps")
        if load not in found or (point.get("num_requests") or 0) > (found[load].get("num_requests") or 0):
            found[load] = point
    return found


def _rows(run: Mapping[str, Any], point: Json) -> Sequence[RequestTiming]:
    return mapping(run.get("points")).get(str(point.get("name"))) or ()


def _short(value: object) -> str:
    text = ABSENT if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."

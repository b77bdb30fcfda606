"""The report of one run: a single HTML file that opens anywhere, offline, and asks nothing of the network.

Plain values in, HTML out. Holes in old or interrupted records are shown as such and never stop the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from markupsafe import Markup

from inferloop.measure.timing import RequestTiming
from inferloop.pages.chart import DRAW, bokeh_script
from inferloop.pages.charts import Described, frontier_charts, over_time
from inferloop.pages.compare import compare_sections
from inferloop.pages.document import document
from inferloop.pages.evidence import gates_table, notes, proof_table, protocol_checks
from inferloop.pages.html import Child, section, tag
from inferloop.pages.load_generator import load_generator
from inferloop.pages.origin import definitions, origin, stages
from inferloop.pages.points import errors_table, percentiles_table, point_name, points_table, stutter_table
from inferloop.pages.quality import quality
from inferloop.pages.sizing import headline, sizing
from inferloop.pages.text import instant, verdict, words
from inferloop.pages.timing import pick_streams, timing_script, timing_simulator
from inferloop.pages.verdicts import Json, declared, is_void, judged_point, mapping, mappings, slo_of, slo_table
from inferloop.pages.waterfall import waterfall

VERB_WORDS = {"bench": "Benchmark", "up": "Service", "eval": "Quality suite", "plan": "Plan", "compare": "Comparison"}


def render_report(run: Mapping[str, Any]) -> str:
    """The page of a run.

    `run`: header (run.json), summary (summary.json or None), status (running | complete | interrupted | void; default
    the header's), requests (RequestTiming, optional), points (the same by point, for comparisons), stages (lines of
    stages.jsonl, optional), contract_text (the file as written, optional).
    """
    header, summary = mapping(run.get("header")), mapping(run.get("summary"))
    rows: Sequence[RequestTiming] = run.get("requests") or ()
    parts = _sections(run, header, summary, rows)
    links = tag("ul", [tag("li", tag("a", title, href=f"#{anchor}")) for anchor, title, _ in parts])
    service = str(header.get("service") or "service")
    body: list[Child] = [
        tag("a", "Skip to the results", href="#results", class_="skip"),
        _head(run, header, summary, service),
        tag("nav", links, aria_label="Parts of this report"),
        tag("main", [section(anchor, title, content) for anchor, title, content in parts], id="results"),
        tag("footer", tag("p", "Written by inferloop. This file needs no network and sends nothing.")),
    ]
    drawn = any("data-chart=" in str(content) for _, _, content in parts)
    scripts = [bokeh_script(), DRAW] if drawn else []
    if any(anchor == "timing" for anchor, _, _ in parts):
        scripts.append(timing_script())
    return document(f"{service}: inferloop report", body, scripts=scripts)


def _sections(
    run: Mapping[str, Any], header: Json, summary: Json, rows: Sequence[RequestTiming]
) -> list[tuple[str, str, list[Child]]]:
    """(anchor, title, content) of each part that has something to say."""
    compares = summary.get("kind") == "compare"
    points = [] if compares else mappings(summary.get("points"))
    slo = slo_of(summary)
    parts: list[tuple[str, str, list[Child]]] = []
    if compares:
        parts += compare_sections(header, summary, run.get("points") or {})
    gates = gates_table(summary)
    if gates:
        parts.append(("gates", "Gates", [gates]))
    if slo:
        at = judged_point(summary)
        said = f"Judged at {point_name(at)}." if at else None
        if at and is_void(at):
            said = f"Seen at {point_name(at)}, a point that is void: its numbers must not be used."
        parts.append(("verdict", "Objectives", [tag("p", said, class_="soft") if said else None, slo_table(slo)]))
    if points:
        sound = [point for point in points if not is_void(point)]
        charts = frontier_charts(sound, declared(summary, header), mapping(summary.get("capacity")))
        void = tag("p", "Points that are void are not drawn.") if len(sound) < len(points) else None
        parts.append(("frontier", "Frontier", [_grid(charts), void, points_table(points), notes(summary, points)]))
        tables: list[Child] = [
            percentiles_table(points),
            stutter_table(points),
            errors_table(points),
            load_generator(summary),
        ]
        parts.append(("percentiles", "Latency", tables))
    sized = sizing(summary, header)
    if sized:
        parts.append(("sizing", "Sizing", [sized]))
    gate = summary if "cases" in summary else mapping(summary.get("quality"))
    if gate:
        parts.append(("quality", "Quality gate", [quality(gate)]))
    checks, proof = protocol_checks(summary), proof_table(summary)
    if checks or proof:
        parts.append(("service", "Service", [proof, checks]))
    by_point = mapping(run.get("points"))
    timeline = None if compares else over_time(rows, by_point)
    bars = None if compares else _waterfall(rows, by_point, summary)
    if timeline or bars:
        parts.append(("requests", "Requests", [timeline.html() if timeline else None, bars]))
    streams = [] if compares else pick_streams({"": rows})
    if streams:
        parts.append(("timing", "Token timing", [timing_simulator(streams)]))
    done = stages(mappings(run.get("stages")), header)
    if done:
        parts.append(("stages", "Stages", [done]))
    parts.append(("origin", "How it was measured", [origin(header), definitions()]))
    text = _contract_text(run, header)
    if text:
        parts.append(("contract", "Contract", [tag("pre", text, tabindex=0, aria_label="The contract")]))
    return parts


def _waterfall(rows: Sequence[RequestTiming], by_point: Json, summary: Json) -> Markup | None:
    """Of the fullest point that keeps the objectives, else of the judged one: points lie apart in time, and where
    little is in flight there is little to see."""
    kept = [p for p in mappings(summary.get("points")) if p.get("verdict") == "pass" and not is_void(p)]
    at = max(kept, key=lambda p: p.get("offered_qps") or 0.0, default=None) or judged_point(summary) or {}
    found = by_point.get(str(at.get("name")))
    return waterfall(found, of=point_name(at)) if found else waterfall(rows)


def _head(run: Mapping[str, Any], header: Json, summary: Json, service: str) -> Markup:
    value = summary.get("verdict", header.get("verdict"))
    status = run.get("status") or header.get("status")
    verb = str(header.get("verb") or "run")
    kicker = " \u00b7 ".join(t for t in (VERB_WORDS.get(verb, verb), instant(header.get("t_start_wall_ns"))) if t)
    reasons = words(summary.get("reasons") or header.get("reasons"))
    listed = tag("ul", [tag("li", reason) for reason in reasons]) if reasons else None
    banners: list[Markup] = []
    if value == "void" or status == "void":
        banners.append(
            _banner("void", "This run is void: a self-check failed, so its numbers must not be used.", listed)
        )
        listed = None
    if status in ("running", "interrupted"):
        word = "was interrupted" if status == "interrupted" else "is still running"
        banners.append(
            _banner("incomplete", f"This run is incomplete: it {word}. What it recorded until then is shown.")
        )
    elif run.get("summary") is None:
        banners.append(_banner("incomplete", "This run has no summary. What it recorded is shown."))
    elif mappings(summary.get("points")) and not run.get("requests"):
        banners.append(
            _banner("incomplete", "The requests of this run are not in its folder: its summary is shown alone.")
        )
    told = headline(summary)
    lead = [tag("p", verdict(value), class_="lead") if value is not None else None, tag("p", told) if told else None]
    if summary.get("kind") == "compare" and value == "not declared":
        lead = []  # nothing is asked of a comparison
    return tag("header", tag("p", kicker, class_="kicker"), tag("h1", service), lead, listed, banners, class_="page")


def _banner(kind: str, text: str, *more: Child) -> Markup:
    return tag("div", tag("p", tag("strong", text)), *more, class_=f"banner {kind}", role="note")


def _grid(charts: Sequence[Described]) -> Markup | None:
    return tag("div", [c.html() for c in charts], class_="charts") if charts else None


def _contract_text(run: Mapping[str, Any], header: Json) -> str | None:
    """The contract as written, else as understood."""
    if run.get("contract_text"):
        return str(run["contract_text"])
    contract = header.get("contract")
    if not isinstance(contract, Mapping):
        return None
    kept = {key: value for key, value in contract.items() if key != "source" and value is not None}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)

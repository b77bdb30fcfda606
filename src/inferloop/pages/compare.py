"""Several targets under the same requests: what differs beyond chance, who dominates whom, how each was set up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from inferloop.measure.timing import RequestTiming
from inferloop.pages.charts import several_frontiers
from inferloop.pages.html import Child, Column, grouped_table, table, tag
from inferloop.pages.setups import setup_tables, targets_table
from inferloop.pages.text import ABSENT, METRICS, number, percent, percentile, reuse_told, signs_of, words
from inferloop.pages.timing import pick_streams, timing_simulator
from inferloop.pages.verdicts import Json, declared, mapping, mappings

Part = tuple[str, str, list[Child]]


def compare_sections(header: Json, summary: Json, points: Mapping[str, Sequence[RequestTiming]]) -> list[Part]:
    """(anchor, title, content) of each part. `points` are the requests by their window's name."""
    targets = mappings(summary.get("targets"))
    measured = mappings(summary.get("points"))
    names = {str(t.get("label")): clipped(f"{t.get('label')}: {t.get('name')}") for t in targets}
    parts: list[Part] = [("targets", "Targets", [targets_table(targets)])]
    reuse = reuse_table(targets)
    if reuse:
        lines = [tag("li", f"{text}.") for t in targets if (text := reuse_told(t))]
        parts.append(("reuse", "Prefix reuse", [tag("ul", lines) if lines else None, reuse]))
    told = found_in_words(mappings(summary.get("comparisons")), targets)
    found = differences_table(mappings(summary.get("comparisons")), names)
    if found:
        parts.append(("differences", "Differences", [told, _read_as(), found]))
    if measured:
        series = {names.get(str(label), str(label)): _of(measured, label) for label in names}
        charts = several_frontiers(series, declared(summary, header))
        grid = tag("div", [c.html() for c in charts], class_="charts") if charts else None
        parts.append(("frontier", "Frontier", [grid, pareto_table(measured)]))
    floor = self_table(mappings(summary.get("self")), targets)
    if floor:
        parts.append(("self", "What chance makes", [floor]))
    setups: list[Child] = [*setup_tables(targets)]
    if setups:
        parts.append(("setups", "How each was set up", setups))
    said = words(summary.get("notes"))
    if said:
        parts.append(("notes", "Notes", [tag("ul", [tag("li", text) for text in said])]))
    rows = {name: _windows(points, label) for label, name in names.items()}
    streams = pick_streams({name: found for name, found in rows.items() if found})
    if streams:
        parts.append(("timing", "Token timing", [timing_simulator(streams)]))
    return parts


def reuse_table(targets: Sequence[Json]) -> Markup | None:
    """What each target's prefix cache did of what the workload declares. None where nothing is known of it, and where
    nothing is declared and nothing was reused."""
    rows: list[list[Child]] = []
    found = [(t, mapping(t["reuse"])) for t in targets if t.get("reuse")]
    if not any(number(reuse.get(name)) not in (ABSENT, "0") for _, reuse in found for name in ("declared", "cached")):
        return None
    for t, reuse in found:
        is_told = reuse.get("verdict") != "not told"
        met = {"as declared": "pass", "less": "fail"}.get(str(reuse.get("verdict")), "not-declared")
        rows.append(
            [
                str(t.get("label")),
                percent(reuse.get("declared")),
                percent(reuse.get("possible")) if is_told else ABSENT,
                percent(reuse.get("cached")),
                tag("span", _REUSE.get(str(reuse.get("verdict")), ABSENT), class_=f"verdict {met}"),
            ]
        )
    columns = [Column("Target"), *(Column(t, True) for t in ("Declared", "Possible", "Reused")), Column("")]
    caption = (
        "Of the input tokens: what the workload repeats, what of it had been computed before it was asked for again, "
        "and what came from the target's prefix cache. Differences are between targets as they are, caches included"
    )
    return table(caption, columns, rows)


_REUSE = {"as declared": "\u2713 as declared", "less": "\u2717 less", "not told": "? not told"}


def found_in_words(comparisons: Sequence[Json], targets: Sequence[Json]) -> Markup | None:
    """A line for each target but the first: in what it is better or worse beyond chance, or why it is left out."""
    lines = []
    labels = [str(t.get("label")) for t in targets]
    for label, target in zip(labels[1:], targets[1:], strict=True):
        mine = [d for d in comparisons if d.get("target") == label]
        parts = []
        for better, word in ((True, "better"), (False, "worse")):
            figures = dict.fromkeys(bare_name(d) for d in mine if d.get("better") is better)
            parts += [f"{word} in {', '.join(figures)}"] if figures else []
        if target.get("void"):
            lines.append(f"{target['void']}.")
        elif mine:
            lines.append(f"{label} against {labels[0]}: {'; '.join(parts) or 'no difference beyond chance'}.")
    return tag("ul", [tag("li", line) for line in lines]) if lines else None


def clipped(name: str, room: int = 44) -> str:
    """With its middle left out where it is long: what tells targets apart stands at the end."""
    return name if len(name) <= room else f"{name[: room // 2 - 4]}\u2026{name[-room // 2 - 2 :]}"


def differences_table(comparisons: Sequence[Json], names: Mapping[str, str]) -> Markup | None:
    """A group per target and rate, a row per figure."""
    groups: dict[str, list[list[Child]]] = {}
    for d in comparisons:
        title = f"{names.get(str(d.get('target')), str(d.get('target')))} at {number(d.get('offered_qps'))}/s"
        groups.setdefault(title, []).append(
            [
                figure_name(d),
                _value(d, "a"),
                _value(d, "b"),
                _difference(d),
                interval_text(mapping(d.get("interval")), signs_of(d)),
                _value(d, "noise_floor"),
                called(d),
            ]
        )
    if not groups:
        return None
    columns = [Column("Figure"), *(Column(t, True) for t in ("First", "This", "Difference", "95 % interval"))]
    columns += [Column("Noise floor", True), Column("Beyond chance")]
    return grouped_table("Against the first target, window by window", columns, list(groups.items()))


def pareto_table(points: Sequence[Json]) -> Markup:
    """Every target at every rate; dominated rows say by which."""
    rows: list[list[Child]] = []
    for p in points:
        ttft, tpot = mapping(p.get("ttft_ms")), mapping(p.get("tpot_ms"))
        by = p.get("dominated_by")
        place = f"dominated by {by}" if by else "on the front" if p.get("ranked_by", True) else "not ranked"
        if p.get("saturated"):
            place = f"saturated, {place}"
        rows.append(
            [
                str(p.get("name")),
                number(p.get("num_requests")),
                number(p.get("output_tok_s")),
                number(p.get("goodput_qps")),
                *(percentile(latency, q) for latency in (ttft, tpot) for q in ("p50", "p95")),
                percent(mapping(p.get("errors")).get("rate")),
                tag("span", place, class_="nowrap"),
            ]
        )
    titles = ("Requests", "Output tok/s", "Good/s", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "Errors")
    columns = [Column("Target"), *(Column(t, True) for t in titles), Column("Pareto")]
    ranked = next((words(p["ranked_by"]) for p in points if p.get("ranked_by")), [])
    by = ", ".join(bare_name({"figure": name}) for name in ranked) or "throughput, TTFT and TPOT"
    caption = (
        "Latencies in ms. A row is dominated when another at the same rate is better beyond chance in one of "
        f"{by}, and worse beyond chance in none; it is not ranked where one of them is not certified of both"
    )
    return tag("div", table(caption, columns, rows), class_="compact")


def self_table(found: Sequence[Json], targets: Sequence[Json]) -> Markup | None:
    """How the first target differed from itself."""
    rows: list[list[Child]] = []
    for s in found:
        differences = s.get("differences")
        told = ", ".join(signed(d) for d in differences) if isinstance(differences, list) else ABSENT
        rows.append([figure_name(s), f"{number(s.get('offered_qps'))}/s", told])
    if not rows:
        return None
    first = str(targets[0].get("label")) if targets else "the first"
    return table(
        f"{first} against itself: the second window of each pair less the first, where nothing differs but chance",
        [Column("Figure"), Column("Rate", True), Column("Differences", wide=True)],
        rows,
    )


def bare_name(d: Json) -> str:
    """`TTFT p95`."""
    metric, _, quantile = str(d.get("figure")).partition(" ")
    return f"{METRICS.get(metric, metric)} {quantile}".rstrip()


def figure_name(d: Json) -> str:
    """`TTFT p95, ms`."""
    metric, _, quantile = str(d.get("figure")).partition(" ")
    unit = ", ms" if metric.endswith("_ms") else ", tok/s" if metric.endswith("tok_s") else "/s"
    name = METRICS.get(metric, metric)
    return f"{name} {quantile}{unit}" if quantile else f"{name}{unit}" if unit != "/s" else name


def signed(value: object) -> str:
    """With a plus where it is above zero."""
    text = number(value)
    return f"+{text}" if isinstance(value, int | float) and value > 0 else text


def interval_text(interval: Json, signs: Mapping[str, str] | None = None) -> str:
    """`signs` are those of ends that are infinite; by themselves nothing bounds it on that side."""
    if not interval:
        return ABSENT
    infinite, signs = words(interval.get("infinite")), signs or {"low": "-", "high": "+"}
    ends = [f"{signs[end]}\u221e" if end in infinite else signed(interval.get(end)) for end in ("low", "high")]
    return f"{ends[0]} to {ends[1]}"


def _difference(d: Json) -> str:
    """With the sign of what is infinite in it."""
    if "difference" in words(d.get("infinite")):
        return f"{signs_of(d)['difference']}\u221e"
    return signed(d.get("difference"))


def called(d: Json) -> Markup:
    """In words; colour only repeats them. Without an interval too little was answered to say anything."""
    better = d.get("better")
    if not d.get("interval"):
        return tag("span", "not known", class_="verdict not-declared")
    if better is None:
        return tag("span", "no difference", class_="verdict not-declared")
    word = "better" if better else "worse"
    symbol = "\u25b2" if d.get("called") == "more" else "\u25bc"
    return tag("span", f"{symbol} {word}", class_=f"verdict {'pass' if better else 'fail'}")


def _value(d: Json, name: str) -> str:
    return "\u221e" if name in words(d.get("infinite")) else number(d.get(name))


def _read_as() -> Markup:
    return tag(
        "p",
        "A difference is called only when its interval, from the same requests resampled on both sides, excludes zero, "
        "and it exceeds the noise floor: what paired windows differ by chance, as seen when the first target is "
        "measured against itself, shared out among all that is compared here.",
    )


def _of(points: Sequence[Json], label: str) -> list[Json]:
    return [p for p in points if p.get("target") == label]


def _windows(points: Mapping[str, Sequence[RequestTiming]], label: str) -> list[RequestTiming]:
    return [r for name, rows in points.items() if name.split("/")[:2] == ["versus", label] for r in rows]

"""Which charts a report has: latency and throughput against load, latency over time. Each carries its words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from inferloop.core.units import NS_PER_S
from inferloop.measure.samples import is_failure
from inferloop.measure.timing import RequestTiming, ttft_ms
from inferloop.pages.chart import Chart, Series, Span, all_numbers, both_schemes
from inferloop.pages.document import data_block
from inferloop.pages.html import tag
from inferloop.pages.legend import legend
from inferloop.pages.text import METRICS, number

_SHOWN = ("ttft_ms", "tpot_ms", "ttlt_ms")
_PERCENTILES = ("p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Described:
    """A chart with its heading and what it shows in words, for those who do not see it. `notes`: those of the words
    that tell how to read its marks."""

    anchor: str
    title: str
    chart: Chart
    words: str
    notes: str = ""

    def html(self) -> Markup:
        holder = f"plot-{self.anchor}"
        return tag(
            "figure",
            tag("h3", self.title, id=f"title-{self.anchor}"),
            legend(self.chart),
            data_block(f"data-{self.anchor}", both_schemes(self.chart)),
            tag(
                "div",
                id=holder,
                class_="plot",
                data_chart=f"data-{self.anchor}",
                role="img",
                aria_label=f"{self.title}. {self.words}",
            ),
            tag("figcaption", self.words),
            aria_labelledby=f"title-{self.anchor}",
        )


def frontier_charts(
    points: Sequence[Mapping[str, Any]],
    objectives: Sequence[tuple[str, str, float]],
    capacity: Mapping[str, Any] | None = None,
) -> list[Described]:
    """One chart per latency that has data, and one of throughput. `objectives`: (metric, label, limit); `capacity`: as
    in summary.json."""
    measured = _by_rate(points)
    loaded = _loaded(measured)
    edge = _edge(capacity) if _offered(loaded) else None
    charts = []
    for metric in _SHOWN:
        series = [_latency_series(name, loaded, metric, name) for name in _PERCENTILES]
        charts += _latency_chart(metric, series, objectives, edge, _x_title(loaded))
    others = [p for p in measured if p not in loaded]
    series = [_token_series("open loop" if others else "output tokens/s", loaded)]
    if others:
        modes = dict.fromkeys(str(p.get("mode") or "other") for p in others)
        series.append(_token_series(f"{', '.join(modes)}: at the rate it achieved", others))
    told = tuple(s for s in series if any(y is not None for y in s.y))
    tokens = Chart(_x_title(loaded), "output tokens/s", told, edge=edge)
    if not tokens.empty:
        best = max(y for s in tokens.series for y in s.y if y is not None)
        words = f"The most measured is {number(best)} output tokens per second, all requests together."
        charts.append(Described("tokens", "Throughput against load", tokens, words))
    return charts


def several_frontiers(
    named: Mapping[str, Sequence[Mapping[str, Any]]], objectives: Sequence[tuple[str, str, float]]
) -> list[Described]:
    """The charts of `frontier_charts` with one line per name: the percentile that all points have, p95 at best."""
    measured = {name: _by_rate(points) for name, points in named.items()}
    charts = []
    for metric in _SHOWN:
        loaded = {name: _loaded(points) for name, points in measured.items()}
        everything = [point for points in loaded.values() for point in points]
        told = all(_latency(p, metric).get("p95") is not None for p in everything)
        percentile = "p95" if told else "p50"
        series = [_latency_series(name, points, metric, percentile) for name, points in loaded.items()]
        made = _latency_chart(metric, series, objectives, x_title=_x_title(everything))
        charts += [
            replace(
                chart,
                title=f"{METRICS[metric]} {percentile} against load",
                words=_each_in_words(metric, percentile, chart),
            )
            for chart in made
        ]
    tokens = tuple(_token_series(name, points) for name, points in measured.items())
    tokens = tuple(s for s in tokens if any(y is not None for y in s.y))
    chart = Chart(_x_title([p for points in measured.values() for p in points]), "output tokens/s", tokens)
    if not chart.empty:
        best = {s.name: max((y for y in s.y if y is not None), default=None) for s in tokens}
        told_best = ", ".join(f"{name} {number(value)}" for name, value in best.items())
        words = f"The most output tokens per second, all requests together: {told_best}."
        charts.append(Described("tokens", "Throughput against load", chart, words))
    return charts


def _each_in_words(metric: str, percentile: str, made: Described) -> str:
    """The highest load of each line."""
    ends = []
    for series in made.chart.series:
        x, y = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None][-1]
        ends.append(f"{series.name} {number(y)} ms at {number(x)}/s")
    words = f"{METRICS[metric]} {percentile} at the highest load: {'; '.join(ends)}."
    if made.chart.limit is not None:
        words += f" The objective is {made.chart.limit_name}."
    return words + made.notes


def _by_rate(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted((p for p in points if _rate(p) is not None), key=lambda p: _rate(p) or 0.0)


def _loaded(measured: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A burst waits in its own queue: another question than a rate."""
    return [p for p in measured if p.get("mode") == "open"] or measured


def _offered(points: Sequence[Mapping[str, Any]]) -> bool:
    """Whether their rates are those that were asked for."""
    return bool(points) and all(p.get("mode") == "open" and _is_number(p.get("offered_qps")) for p in points)


def _x_title(points: Sequence[Mapping[str, Any]]) -> str:
    return "queries/s offered" if _offered(points) else "queries/s"


def _latency_series(name: str, points: Sequence[Mapping[str, Any]], metric: str, percentile: str) -> Series:
    found = [_latency(p, metric) for p in points]
    return Series(
        name,
        _only(all_numbers([_rate(p) for p in points])),
        all_numbers([latency.get(percentile) for latency in found]),
        connected=all(p.get("mode") == "open" for p in points),
        band=tuple(_interval(latency, percentile) for latency in found),
        faint=_scouted(points),
        crossed=tuple(_fell_behind(p) for p in points),
    )


def _token_series(name: str, points: Sequence[Mapping[str, Any]]) -> Series:
    return Series(
        name,
        _only(all_numbers([_rate(p) for p in points])),
        all_numbers([p.get("output_tok_s") for p in points]),
        connected=_offered(points),
        faint=_scouted(points),
        crossed=tuple(_fell_behind(p) for p in points),
    )


def _scouted(points: Sequence[Mapping[str, Any]]) -> tuple[bool, ...]:
    return tuple(p.get("role") == "scout" for p in points)


def _fell_behind(point: Mapping[str, Any]) -> bool:
    """More arrived than was completed, beyond chance: its latencies are as long as the window lets them be. By the
    level's own balance where it is told, else by the interval of what it achieved."""
    balance = point.get("balance")
    if isinstance(balance, Mapping):
        return balance.get("verdict") == "saturated"
    interval = point.get("achieved_interval")
    most = interval.get("high") if isinstance(interval, Mapping) else None
    high, arrived = all_numbers([most, point.get("arrival_qps")])
    return point.get("mode") == "open" and high is not None and arrived is not None and high < arrived


def _edge(capacity: Mapping[str, Any] | None) -> Span | None:
    """Where the objectives are used up: the interval, else the bracket of what passed and what failed."""
    if capacity is None or not _is_number(capacity.get("qps")):
        return None
    at, interval = float(capacity["qps"]), capacity.get("interval")
    if isinstance(interval, Mapping) and _is_number(interval.get("low")):
        low, high, told = float(interval["low"]), interval.get("high"), "95 %"
    else:
        low = float(capacity["low"]) if _is_number(capacity.get("low")) else at
        high, told = capacity.get("high"), "between"
    end = all_numbers([high])[0] or math.inf
    joined = "and" if told == "between" else "to"
    return Span(f"capacity {number(at)}/s ({told} {number(low)} {joined} {number(end)})", low, end, at)


def _latency_chart(
    metric: str,
    series: Sequence[Series],
    objectives: Sequence[tuple[str, str, float]],
    edge: Span | None = None,
    x_title: str = "queries/s offered",
) -> list[Described]:
    """One chart, or none without data."""
    limits = [(label, limit) for m, label, limit in objectives if m == metric]
    label, limit = limits[0] if limits else ("", None)
    known = tuple(s for s in series if any(y is not None for y in s.y))
    chart = Chart(x_title, "ms", known, limit, label, edge=edge)
    if chart.empty:
        return []
    notes = ""
    if any(any(s.band) for s in known):
        notes += " Shaded around each line: the 95 % interval."
    if any(any(s.faint) for s in known):
        notes += " Hollow points only scouted."
    if any(any(s.crossed) for s in known):
        notes += " Where a point is crossed out, more arrived than was completed: it would get worse without end."
    title = f"{METRICS[metric]} against load"
    return [Described(metric.removesuffix("_ms"), title, chart, _latency_words(metric, chart) + notes, notes)]


def _interval(latency: Mapping[str, Any], percentile: str) -> tuple[float, float] | None:
    """An end that is null in the records is infinite."""
    intervals = latency.get("intervals")
    found = intervals.get(percentile) if isinstance(intervals, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    low, high = all_numbers([found.get("low"), found.get("high")])
    return (0.0 if low is None else low, math.inf if high is None else high)


def over_time(
    rows: Sequence[RequestTiming], points: Mapping[str, Sequence[RequestTiming]] | None = None
) -> Described | None:
    """TTFT of each request at the second it was sent; None without a token. `points`: the requests by point, whose
    stretches of time get a ground of their own."""
    if not rows:
        return None
    start = min(r.t_send_ns for r in rows)
    seen = sorted(((r.t_send_ns - start) / NS_PER_S, ttft_ms(r)) for r in rows if r.chunks and r.ok)
    failed = tuple(sorted((r.t_send_ns - start) / NS_PER_S for r in rows if is_failure(r)))
    if not seen:
        return None
    series = Series("TTFT", tuple(x for x, _ in seen), tuple(y for _, y in seen), connected=False)
    values = sorted(y for _, y in seen if y is not None)
    half = len(seen) // 2
    words = f"TTFT of {len(seen)} requests lay between {number(values[0])} and {number(values[-1])} ms."
    if half >= 10:
        early = sorted(y for _, y in seen[:half] if y is not None)[half // 2]
        late = sorted(y for _, y in seen[half:] if y is not None)[(len(seen) - half) // 2]
        words += (
            f" Its median was {number(early)} ms in the first half of the requests and {number(late)} ms in the second."
        )
    if failed:
        words += f" {len(failed)} failed; crosses along the top mark when they were sent."
    stages = _stages(points or {}, start)
    if len(stages) > 1:
        words += f" The ground changes with the point of load; in turn: {', '.join(s.name for s in stages)}."
    chart = Chart("seconds after the start", "ms", (series,), failed_x=failed, stages=stages)
    return Described("time", "TTFT over time", chart, words)


def _stages(points: Mapping[str, Sequence[RequestTiming]], start: int) -> tuple[Span, ...]:
    """From each point's first send to that of the next one; the last ends with its last send."""
    begun = sorted((min(r.t_send_ns for r in rows), name) for name, rows in points.items() if rows)
    if not begun:
        return ()
    ends = [begin for begin, _ in begun[1:]] + [max(r.t_send_ns for r in points[begun[-1][1]])]
    return tuple(
        Span(name, (begin - start) / NS_PER_S, (end - start) / NS_PER_S)
        for (begin, name), end in zip(begun, ends, strict=True)
    )


def _latency_words(metric: str, chart: Chart) -> str:
    promised = re.search(r"p[\d.]+", chart.limit_name)
    by_name = {series.name: series for series in chart.series}
    shown = by_name.get(promised.group()) if promised else None
    told = shown or by_name.get("p95") or chart.series[0]
    known = [(x, y) for x, y in zip(told.x, told.y, strict=True) if y is not None]
    (x0, y0), (x1, y1) = known[0], known[-1]
    words = f"{METRICS[metric]} {told.name}: {number(y0)} ms at {number(x0)} queries/s"
    if len(known) > 1:
        words += f", {number(y1)} ms at {number(x1)} queries/s"
    words += "."
    if chart.limit is None:
        return words
    words += f" The objective is {chart.limit_name}; "
    if promised and shown is None:
        return f"{words}no point has the requests to certify {promised.group()}."
    faint = told.faint or (False,) * len(told.x)
    kinds = [f for f, y in zip(faint, told.y, strict=True) if y is not None]
    parts = []
    for scouted, kind in ((False, "certified"), (True, "scouted")):
        ys = [y for (_, y), f in zip(known, kinds, strict=True) if f is scouted]
        over = sum(y > chart.limit for y in ys)
        if ys:
            parts.append(f"{over} of {len(ys)} {kind} points exceed it" if over else f"no {kind} point exceeds it")
    return f"{words}{', '.join(parts)}."


def _rate(point: Mapping[str, Any]) -> float | None:
    """The rate that was asked for in an open loop: what is achieved stands still once the service is full."""
    names = ("offered_qps", "achieved_qps") if point.get("mode") == "open" else ("achieved_qps", "offered_qps")
    first, second = all_numbers([point.get(name) for name in names])
    return first if first is not None else second


def _is_number(value: Any) -> bool:
    return all_numbers([value])[0] is not None


def _latency(point: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    found = point.get(metric)
    return found if isinstance(found, Mapping) else {}


def _only(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(v for v in values if v is not None)

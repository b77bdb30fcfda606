"""Which charts a report has: latency and throughput against load, latency over time. Each carries its words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from inferloop.core.units import NS_PER_S
from inferloop.measure.samples import is_failure
from inferloop.measure.timing import RequestTiming, ttft_ms
from inferloop.pages.chart import Chart, Series, all_numbers, both_schemes
from inferloop.pages.document import data_block
from inferloop.pages.html import tag
from inferloop.pages.text import METRICS, number

_SHOWN = ("ttft_ms", "tpot_ms", "ttlt_ms")
_PERCENTILES = ("p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Described:
    """A chart with its heading and what it shows in words, for those who do not see it."""

    anchor: str
    title: str
    chart: Chart
    words: str

    def html(self) -> Markup:
        holder = f"plot-{self.anchor}"
        return tag(
            "figure",
            tag("h3", self.title),
            data_block(f"data-{self.anchor}", both_schemes(self.chart)),
            tag("div", id=holder, class_="plot", data_chart=f"data-{self.anchor}", role="img", aria_label=self.words),
            tag("figcaption", self.words),
        )


def frontier_charts(
    points: Sequence[Mapping[str, Any]], objectives: Sequence[tuple[str, str, float]]
) -> list[Described]:
    """One chart per latency that has data, and one of throughput. `objectives`: (metric, label, limit)."""
    measured = _by_rate(points)
    loaded = _loaded(measured)
    charts = []
    for metric in _SHOWN:
        series = [_latency_series(name, loaded, metric, name) for name in _PERCENTILES]
        charts += _latency_chart(metric, series, objectives)
    tokens = Chart("achieved queries/s", "output tokens/s", (_token_series("output tokens/s", measured),))
    if not tokens.empty:
        best = max(y for y in tokens.series[0].y if y is not None)
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
        series = [
            _latency_series(f"{name} {percentile}", points, metric, percentile) for name, points in loaded.items()
        ]
        charts += _latency_chart(metric, series, objectives)
    tokens = tuple(_token_series(name, points) for name, points in measured.items())
    chart = Chart("achieved queries/s", "output tokens/s", tokens)
    if not chart.empty:
        best = {s.name: max((y for y in s.y if y is not None), default=None) for s in tokens}
        told_best = ", ".join(f"{name} {number(value)}" for name, value in best.items())
        words = f"The most output tokens per second, all requests together: {told_best}."
        charts.append(Described("tokens", "Throughput against load", chart, words))
    return charts


def _by_rate(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted((p for p in points if _rate(p) is not None), key=lambda p: _rate(p) or 0.0)


def _loaded(measured: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A burst waits in its own queue: another question than a rate."""
    return [p for p in measured if p.get("mode") == "open"] or measured


def _latency_series(name: str, points: Sequence[Mapping[str, Any]], metric: str, percentile: str) -> Series:
    found = [_latency(p, metric) for p in points]
    return Series(
        name,
        _only(all_numbers([_rate(p) for p in points])),
        all_numbers([latency.get(percentile) for latency in found]),
        connected=all(p.get("mode") == "open" for p in points),
        band=tuple(_interval(latency, percentile) for latency in found),
        faint=tuple(p.get("role") == "scout" for p in points),
    )


def _token_series(name: str, points: Sequence[Mapping[str, Any]]) -> Series:
    rates = _only(all_numbers([_rate(p) for p in points]))
    return Series(name, rates, all_numbers([p.get("output_tok_s") for p in points]), connected=False)


def _latency_chart(
    metric: str, series: Sequence[Series], objectives: Sequence[tuple[str, str, float]]
) -> list[Described]:
    """One chart, or none without data."""
    limits = [(label, limit) for m, label, limit in objectives if m == metric]
    label, limit = limits[0] if limits else ("", None)
    known = tuple(s for s in series if any(y is not None for y in s.y))
    chart = Chart("achieved queries/s", "ms", known, limit, label)
    if chart.empty:
        return []
    words = _latency_words(metric, chart)
    if any(any(s.band) for s in known):
        words += " Shaded around each line: the 95 % interval."
    if any(any(s.faint) for s in known):
        words += " Hollow points only scouted."
    return [Described(metric.removesuffix("_ms"), f"{METRICS[metric]} against load", chart, words)]


def _interval(latency: Mapping[str, Any], percentile: str) -> tuple[float, float] | None:
    """An end that is null in the records is infinite."""
    intervals = latency.get("intervals")
    found = intervals.get(percentile) if isinstance(intervals, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    low, high = all_numbers([found.get("low"), found.get("high")])
    return (0.0 if low is None else low, math.inf if high is None else high)


def over_time(rows: Sequence[RequestTiming]) -> Described | None:
    """TTFT of each request at the second it was sent; None without a token."""
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
    return Described(
        "time", "TTFT over time", Chart("seconds after the start", "ms", (series,), failed_x=failed), words
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
    over = sum(y > chart.limit for _, y in known)
    exceed = f"{over} of {len(known)} certified points exceed it" if over else "no certified point exceeds it"
    return f"{words}{exceed}."


def _rate(point: Mapping[str, Any]) -> float | None:
    found = all_numbers([point.get("achieved_qps")])[0]
    return found if found is not None else all_numbers([point.get("offered_qps")])[0]


def _latency(point: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    found = point.get(metric)
    return found if isinstance(found, Mapping) else {}


def _only(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(v for v in values if v is not None)

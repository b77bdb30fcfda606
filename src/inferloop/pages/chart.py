"""Line and scatter charts in Bokeh, each as a light and a dark document that the page chooses between."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of one scheme. Series differ in marker and dash too, never in colour alone."""

    ink: str
    soft: str
    line: str
    ground: str
    series: tuple[str, ...]
    bad: str


LIGHT = Palette(
    "#1c2024", "#5f6772", "#dfe3e8", "#ffffff", ("#1f5fbf", "#0f8a8a", "#8a5a00", "#7a3fb0", "#4a5560"), "#b3261e"
)
DARK = Palette(
    "#e4e7eb", "#98a1ad", "#2e343c", "#14171a", ("#82b1ff", "#5cd0d0", "#e6b450", "#c9a0f0", "#aab4c0"), "#ff8a80"
)
_DENSE = 40
"""More points than this are drawn small and see-through, so that their crowding shows."""
MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle")
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")
_ROOM_FOR_BANDS = 1.6
"""Of the highest point: as far up the axis goes to show where an interval ends."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points in the order of x; a None y is a gap. The line goes through the mean of what has the same x; `connected`
    False draws markers alone. `band` has the (low, high) of each point's interval, infinite where nothing bounds it,
    None where there is none. `faint` marks the points that only scouted: they are drawn hollow. `crossed` marks those
    where the service fell behind: they are crossed out."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    connected: bool = True
    band: tuple[tuple[float, float] | None, ...] = ()
    faint: tuple[bool, ...] = ()
    crossed: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of x, from `low` to `high`, with a line at `at` (None: no line)."""

    name: str
    low: float
    high: float
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """`limit` shades all above it as out of bounds. `failed_x` marks instants of failures along the top. `edge` shades
    the stretch of x that a boundary lies in; `stages` are named stretches of x, told apart by their ground."""

    x_title: str
    y_title: str
    series: tuple[Series, ...]
    limit: float | None = None
    limit_name: str = ""
    failed_x: tuple[float, ...] = ()
    edge: Span | None = None
    stages: tuple[Span, ...] = ()

    @property
    def empty(self) -> bool:
        return not any(y is not None for s in self.series for y in s.y)


def both_schemes(chart: Chart) -> dict[str, Any]:
    """{light, dark}: Bokeh's embeddable JSON items of the chart."""
    return {"light": _item(chart, LIGHT), "dark": _item(chart, DARK)}


def _item(chart: Chart, palette: Palette) -> dict[str, Any]:
    from bokeh.embed import json_item

    item: dict[str, Any] = json_item(_figure(chart, palette))
    return item


def _figure(chart: Chart, palette: Palette) -> Any:
    from bokeh.models import BoxAnnotation, ColumnDataSource, HoverTool, Label, Range1d
    from bokeh.plotting import figure

    top = _top(chart)
    right = _right(chart)
    plot = figure(
        height=290,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        x_axis_label=chart.x_title,
        y_axis_label=chart.y_title,
        y_range=Range1d(0, top),
        x_range=Range1d(0, right),
        background_fill_color=palette.ground,
        border_fill_color=palette.ground,
        outline_line_color=None,
        min_border_right=12,
    )
    _draw_spans(plot, chart, palette, right)
    if chart.limit is not None and chart.limit < top:
        plot.add_layout(BoxAnnotation(bottom=chart.limit, fill_color=palette.bad, fill_alpha=0.09, line_color=None))
        plot.add_layout(BoxAnnotation(bottom=chart.limit, top=chart.limit, line_color=palette.bad, line_width=1.5))
        plot.add_layout(
            Label(
                x=0,
                y=chart.limit,
                x_offset=6,
                y_offset=4,
                text=chart.limit_name,
                text_color=palette.bad,
                text_font_size="11px",
            )
        )
    for i, series in enumerate(chart.series):
        kept = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
        colour = palette.series[i % len(palette.series)]
        dense = len(kept) > _DENSE
        faint = series.faint or (False,) * len(series.x)
        alphas = [0.0 if f else 0.6 if dense else 1.0 for f, y in zip(faint, series.y, strict=True) if y is not None]
        source = ColumnDataSource({"x": [x for x, _ in kept], "y": [y for _, y in kept], "fill": alphas})
        _draw_band(plot, series, colour, top)
        if series.connected and len(kept) > 1:
            x, y = zip(*_joined(kept, fmean), strict=True)
            plot.line(x, y, color=colour, line_width=2, line_dash=DASHES[i % len(DASHES)])
        marks = plot.scatter(
            "x",
            "y",
            source=source,
            color=colour,
            marker=MARKERS[i % len(MARKERS)],
            size=5 if dense else 8,
            fill_alpha="fill",
            line_alpha=0.0 if dense else 1.0,
        )
        behind = [(x, y) for x, y, c in zip(series.x, series.y, series.crossed, strict=False) if c and y is not None]
        if behind:
            x, y = zip(*behind, strict=True)
            plot.scatter(x, y, marker="x", size=14, line_width=1.5, color=palette.ink)
        tip = [(chart.x_title, "@x{0,0.[00]}"), (f"{series.name}, {chart.y_title}", "@y{0,0.[00]}")]
        plot.add_tools(HoverTool(renderers=[marks], tooltips=tip))
    if chart.failed_x:
        heights = [top * 0.97] * len(chart.failed_x)
        plot.scatter(chart.failed_x, heights, marker="x", size=8, line_width=2, color=palette.bad)
    _dress(plot, palette)
    return plot


def _draw_spans(plot: Any, chart: Chart, palette: Palette, right: float) -> None:
    from bokeh.models import BoxAnnotation
    from bokeh.models import Span as Line

    for i, stage in enumerate(chart.stages):
        if i % 2:
            shade = BoxAnnotation(
                left=stage.low, right=stage.high, fill_color=palette.soft, fill_alpha=0.09, line_color=None
            )
            plot.add_layout(shade)
    if chart.edge is None:
        return
    low, high = chart.edge.low, min(chart.edge.high, right)
    if low < high:
        shade = BoxAnnotation(left=low, right=high, fill_color=palette.ink, fill_alpha=0.08, line_color=None)
        plot.add_layout(shade)
    if chart.edge.at is not None and chart.edge.at <= right:
        plot.add_layout(
            Line(location=chart.edge.at, dimension="height", line_color=palette.ink, line_width=1.5, line_dash="dashed")
        )


def _right(chart: Chart) -> float:
    """The right end of x: all points, and the edge unless it lies far beyond them."""
    right = max((x for s in chart.series for x in s.x), default=1.0)
    if chart.edge is not None:
        ends = [x for x in (chart.edge.at, chart.edge.high) if x is not None and x <= 1.5 * right]
        right = max([right, *ends])
    return right * 1.06 or 1.0


def _draw_band(plot: Any, series: Series, colour: str, top: float) -> None:
    """A whisker per interval, and a shade between neighbours of a connected series."""
    if not series.band:
        return
    told = [
        (x, *band)
        for x, y, band in zip(series.x, series.y, series.band, strict=True)
        if y is not None and band is not None
    ]
    if not told:
        return
    x, low, high = ([column[i] for column in told] for i in range(3))
    low, high = [max(v, 0.0) for v in low], [min(v, top) for v in high]
    if series.connected and len(x) > 1:
        under, over = (_joined(list(zip(x, v, strict=True)), pick) for v, pick in ((low, min), (high, max)))
        ends = {"x": [at for at, _ in under], "y1": [v for _, v in under], "y2": [v for _, v in over]}
        plot.varea(**ends, fill_color=colour, fill_alpha=0.14)
    plot.segment(x0=x, y0=low, x1=x, y1=high, color=colour, line_alpha=0.55)


def _joined(points: Sequence[tuple[float, float]], pick: Callable[[list[float]], float]) -> list[tuple[float, float]]:
    """One point for each x: a line through levels of one rate would go up and down in place."""
    at: dict[float, list[float]] = {}
    for x, y in points:
        at.setdefault(x, []).append(y)
    return [(x, pick(found)) for x, found in at.items()]


def _top(chart: Chart) -> float:
    """The upper end of y: all points, their intervals unless they go far beyond, and the limit unless the points stay
    far below it."""
    highest = max((y for s in chart.series for y in s.y if y is not None), default=1.0)
    ends = [band[1] for s in chart.series for band in s.band if band is not None and band[1] < math.inf]
    highest = max(highest, min(max(ends, default=0.0), highest * _ROOM_FOR_BANDS))
    if chart.limit is not None and chart.limit <= highest * 4:
        highest = max(highest, chart.limit * 1.15)
    return highest * 1.12 or 1.0


def _dress(plot: Any, palette: Palette) -> None:
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_line_color = palette.line
        axis.major_tick_line_color = palette.line
        axis.minor_tick_line_color = None
        axis.major_label_text_color = palette.soft
        axis.major_label_text_font_size = "11px"
        axis.axis_label_text_color = palette.soft
        axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.formatter.use_scientific = False
    plot.xgrid.grid_line_color = None
    plot.ygrid.grid_line_color = palette.line


@cache
def bokeh_script() -> str:
    """Bokeh's own JavaScript, from its installed package."""
    from bokeh.resources import Resources

    resources = Resources(mode="inline", components=["bokeh"])
    return "\n".join(script for script in resources.js_raw if not script.startswith("Bokeh.set_log_level"))


def all_numbers(values: Sequence[Any]) -> tuple[float | None, ...]:
    """Values of JSON as floats, None for what is not a finite number."""
    return tuple(
        float(v) if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) else None
        for v in values
    )


DRAW = """
"use strict";
(function () {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const holders = Array.from(document.querySelectorAll("[data-chart]"));
  async function draw() {
    for (const holder of holders) {
      const items = JSON.parse(document.getElementById(holder.dataset.chart).textContent);
      holder.replaceChildren();
      await Bokeh.embed.embed_item(dark.matches ? items.dark : items.light, holder.id);
    }
    document.documentElement.dataset.charts = "drawn";
  }
  Bokeh.set_log_level("error");
  dark.addEventListener("change", draw);
  draw();
})();
"""
"""Draws every chart of a page, again when the colour scheme changes."""

"""What the marks of a chart mean, as HTML: it wraps on a narrow page, and long names never run into each other."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from inferloop.pages.chart import DASHES, LIGHT, MARKERS, Chart
from inferloop.pages.html import Child, tag

_PATTERNS = {"solid": None, "dashed": "6 3", "dotted": "2 3", "dotdash": "2 3 6 3", "dashdot": "6 3 2 3"}
_SHAPES = {
    "circle": "M10 7a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "square": "M10 3h8v8h-8z",
    "triangle": "M14 2.5l4.5 8h-9z",
    "diamond": "M14 2l4.5 5l-4.5 5l-4.5-5z",
    "inverted_triangle": "M9.5 3.5h9l-4.5 8z",
}
_CROSS = "M10 3l8 8M18 3l-8 8"


def legend(chart: Chart) -> Markup | None:
    """None where a single series needs no name and nothing else is marked."""
    entries = list(_entries(chart))
    return tag("ul", [tag("li", *entry) for entry in entries], class_="key") if entries else None


def _entries(chart: Chart) -> Iterator[tuple[Child, Child]]:
    for i, series in enumerate(chart.series if len(chart.series) > 1 else ()):
        dash = DASHES[i % len(DASHES)] if series.connected else None
        yield _sample(_SHAPES[MARKERS[i % len(MARKERS)]], f"series-{i % len(LIGHT.series)}", dash=dash), series.name
    if any(any(s.faint) for s in chart.series):
        yield _sample(_SHAPES["circle"], "soft hollow"), "only scouted"
    if any(any(s.crossed) for s in chart.series):
        yield _sample(_CROSS, "ink"), "the service fell behind"
    if chart.failed_x:
        yield _sample(_CROSS, "bad"), "failed"
    if chart.edge is not None:
        yield tag("span", class_="swatch edge", aria_hidden="true"), chart.edge.name


def _sample(shape: str, css_class: str, *, dash: str | None = None) -> Markup:
    line = None if dash is None else tag("path", d="M0 7H28", stroke_dasharray=_PATTERNS[dash], class_="line")
    return tag(
        "svg", line, tag("path", d=shape, class_="mark"), viewBox="0 0 28 14", class_=f"sample {css_class}",
        aria_hidden="true",
    )  # fmt: skip

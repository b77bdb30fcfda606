"""The first requests of a run, each as a bar: waiting to be sent, waiting for the first token, receiving the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from inferloop.core.units import NS_PER_S, ns_to_ms
from inferloop.measure.samples import CENSORED, is_failure
from inferloop.measure.timing import RequestTiming
from inferloop.pages.html import tag
from inferloop.pages.text import error_class, number

MAX_ROWS = 40
_ROW_PX, _BAR_PX, _TOP_PX = 16, 10, 22
_KEY = (
    ("wait", "due, not yet sent"),
    ("first", "sent to first token"),
    ("rest", "first to last token"),
    ("cut", "unfinished at the cut-off"),
    ("failed", "failed"),
)


def waterfall(rows: Sequence[RequestTiming], *, of: str | None = None, max_rows: int = MAX_ROWS) -> Markup | None:
    """An SVG that scales in width, with a key and words. `of`: the point that the rows are of. None without rows."""
    shown = sorted(rows, key=_due)[:max_rows]
    if not shown:
        return None
    start = _due(shown[0])
    span = max(max(r.t_end_ns for r in shown) - start, 1)
    height = _TOP_PX + _ROW_PX * len(shown)
    num_failed, num_cut = sum(is_failure(r) for r in shown), sum(r.error == CENSORED for r in shown)
    words = (
        f"The first {len(shown)} of {len(rows)} requests{f' at {of}' if of else ''} over {number(span / NS_PER_S)} s. "
        f"{num_failed} of them failed, {num_cut} were unfinished at the cut-off."
    )
    svg = tag(
        "svg",
        _axis(span, height),
        [_bars(r, start, span, _TOP_PX + i * _ROW_PX) for i, r in enumerate(shown)],
        height=height,
        role="img",
        aria_label=words,
    )
    key = tag("ul", [tag("li", tag("span", class_=f"swatch {c}"), name) for c, name in _KEY], class_="key")
    return tag(
        "figure",
        tag("h3", "The first requests"),
        key,
        svg,
        tag("figcaption", words, " Point at a bar for its numbers."),
    )


def _due(r: RequestTiming) -> int:
    return r.t_send_ns if r.t_intended_ns is None else r.t_intended_ns


def _bars(r: RequestTiming, start: int, span: int, y: int) -> Markup:
    def bar(a: int, b: int, kind: str) -> Markup:
        x, width = 100.0 * (a - start) / span, 100.0 * (b - a) / span
        return tag("rect", x=f"{x:.3f}%", y=y, width=f"{max(width, 0.05):.3f}%", height=_BAR_PX, class_=kind)

    parts = [] if r.t_send_ns <= _due(r) else [bar(_due(r), r.t_send_ns, "wait")]
    if not r.ok:
        parts.append(bar(r.t_send_ns, r.t_end_ns, "cut" if r.error == CENSORED else "failed"))
    elif r.chunks:
        parts.append(bar(r.t_send_ns, r.chunks[0].t_ns, "first"))
        parts.append(bar(r.chunks[0].t_ns, r.chunks[-1].t_ns, "rest"))
    return tag("g", tag("title", _tip(r)), parts)


def _tip(r: RequestTiming) -> str:
    if not r.ok:
        return f"{r.request_id}: {error_class(r.error or '')} after {number(ns_to_ms(r.t_end_ns - r.t_send_ns))} ms"
    if not r.chunks:
        return r.request_id
    first = number(ns_to_ms(r.chunks[0].t_ns - r.t_send_ns))
    last = number(ns_to_ms(r.chunks[-1].t_ns - r.t_send_ns))
    return (
        f"{r.request_id}: {r.num_input_tokens} tokens in, {r.num_output_tokens} out; first token after {first} ms, "
        f"last after {last} ms"
    )


def _axis(span: int, height: int) -> Markup:
    """Round seconds; the last one that would run out of the picture is named on its left."""
    marks = []
    seconds = span / NS_PER_S
    step = round_step(seconds)
    for i in range(int(seconds / step * (1 + 1e-9)) + 1):
        x = 100.0 * i * step / seconds
        at = "start" if i == 0 else "end" if x > 95 else "middle"
        marks.append(tag("line", x1=f"{x:.3f}%", x2=f"{x:.3f}%", y1=_TOP_PX - 6, y2=height, class_="rule"))
        marks.append(tag("text", f"{number(i * step)} s", x=f"{x:.3f}%", y=11, text_anchor=at))
    return tag("g", marks, aria_hidden="true")


def round_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that a positive span has at most five such steps."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= 5)

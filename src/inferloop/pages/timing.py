"""The token-timing simulator: recorded answers replayed side by side, as their readers saw them.

A percentile says how long; a replay shows what that is like. Lanes replay chunk arrivals of real requests, or invented
ones (lognormal gaps, stalls, bursts of accepted drafts); a slider holds tokens back to smooth what arrives in bursts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from markupsafe import Markup

from inferloop.core.units import ns_to_ms
from inferloop.measure.quantiles import quantile
from inferloop.measure.stutter import STALL_MS
from inferloop.measure.timing import READING_TOK_S, RequestTiming, max_gap_ms, ttlt_ms
from inferloop.pages.document import data_block
from inferloop.pages.html import Child, tag

_MANY = 100
"""From so many answers on, one in a hundred exists."""
_FIGURES = (
    ("first", "First token shown"),
    ("last", "Last token shown"),
    ("tpot", "Time per token"),
    ("longest", "Longest pause"),
    ("stalls", f"Pauses over {STALL_MS:g} ms"),
    ("blocked", "Reader waits"),
    ("probability", "Chance of a stall, 1\u2212(1\u2212p)^T"),
)


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer: (ms after the send, tokens) of each chunk, in order."""

    name: str
    chunks: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class _Number:
    """An input of the invented answer."""

    name: str
    label: str
    value: float
    high: float
    low: float = 0
    step: float = 1


_INVENTED = (
    _Number("ttft", "First token, ms", 300, 60000),
    _Number("gap", "Mean gap between chunks, ms", 30, 5000, 1),
    _Number("cv", "Spread of gaps (deviation / mean)", 0.3, 5, 0, 0.1),
    _Number("tokens", "Tokens", 200, 5000, 1),
    _Number("stall_share", "Gaps that stall, %", 1, 100, 0, 0.1),
    _Number("stall", "Length of a stall (a long prefill), ms", 600, 60000),
    _Number("drafts", "Drafts per step", 0, 16),
    _Number("acceptance", "Chance that a draft is accepted, %", 70, 100),
    _Number("seed", "Seed", 1, 2**31 - 1),
)


_INVENTED_TITLE = "The invented answer, if it is chosen above"


def pick_streams(runs: Mapping[str, Sequence[RequestTiming]]) -> list[Stream]:
    """Of each run, by its name: the answer at the median of TTLT, that at p99 (of fewer than a hundred, the slowest),
    and the one with the longest pause. Answers of one chunk have no timing to show."""
    picked: list[Stream] = []
    for run, rows in runs.items():
        answers = [r for r in rows if r.ok and len(r.chunks) > 1]
        if not answers:
            continue
        by_end = sorted((ttlt_ms(r) or 0.0, i) for i, r in enumerate(answers))
        ends = [end for end, _ in by_end]
        slow = "p99 of TTLT" if len(ends) >= _MANY else "the slowest"
        wanted = {
            "median of TTLT": by_end[ends.index(quantile(ends, 0.5))][1],
            slow: by_end[ends.index(quantile(ends, 0.99))][1],
            "the longest pause": max(range(len(answers)), key=lambda i: max_gap_ms(answers[i]) or 0.0),
        }
        lead = f"{run}: " if run else ""
        picked += [Stream(lead + name, _chunks(answers[i])) for name, i in wanted.items()]
    return picked


def timing_simulator(streams: Sequence[Stream]) -> Markup:
    """The section's content; `timing_script` brings it to life. Without scripts its words remain."""
    told = {"stall_ms": STALL_MS, "streams": [{"name": s.name, "chunks": s.chunks} for s in streams]}
    names = [*((str(i), s.name) for i, s in enumerate(streams)), ("synthetic", "invented, from the numbers below")]
    run_of = [s.name.rpartition(": ")[0] for s in streams]
    second = next((i for i, run in enumerate(run_of) if run != run_of[0]), 1)
    body = tag(
        "div",
        _controls(),
        tag("div", _lane("left", names, 0), _lane("right", names, min(second, len(names) - 1)), class_="lanes"),
        _invented(),
        id="timing-simulator",
        hidden=True,
    )
    return tag(
        "div",
        tag(
            "p",
            "Answers of this run, replayed with the chunks as they arrived. Words stand in for tokens. The line is "
            f"what was shown, the dashed one a reader of {READING_TOK_S:g} tokens a second; shaded stretches are "
            f"pauses of more than {STALL_MS:g} ms, which a reader notices.",
        ),
        data_block("timing-streams", told),
        body,
        tag(
            "p",
            "Even a rare pause is met by most long answers: when a share p of the gaps is slow, an answer of T gaps "
            "meets at least one with probability 1\u2212(1\u2212p)^T, if pauses come independently. Holding tokens "
            "back trades a later first token for an even flow; the pauses it hides are shorter than what is held.",
            class_="soft",
        ),
    )


@cache
def timing_script() -> str:
    return files("inferloop.pages").joinpath("timing.js").read_text()


def _chunks(r: RequestTiming) -> tuple[tuple[float, int], ...]:
    return tuple((round(ns_to_ms(c.t_ns - r.t_send_ns), 2), c.num_tokens) for c in r.chunks)


def _controls() -> Markup:
    button = tag("button", "Play", type="button", data_control="play")
    again = tag("button", "From the start", type="button", data_control="restart")
    speeds = [tag("option", f"{s:g} \u00d7", value=s, selected=s == 1) for s in (0.25, 0.5, 1, 2, 4)]
    return tag(
        "div",
        tag("div", button, again, tag("span", "0.00 s", data_control="time", class_="clock")),
        tag("label", "Speed ", tag("select", speeds, name="speed", data_control="speed")),
        _slider("buffer", "Hold back", 0, 2000, 10, 0),
        _slider("reading", "Reader", 1, 30, 0.1, READING_TOK_S),
        tag("p", role="status", data_control="said", class_="quiet"),
        class_="controls",
    )


def _slider(name: str, label: str, low: float, high: float, step: float, value: float) -> Markup:
    slider = tag("input", type="range", name=name, min=low, max=high, step=step, value=value, data_control=name)
    return tag("label", f"{label} ", slider, tag("span", data_control=f"{name}-value", class_="soft"))


def _lane(name: str, names: Sequence[tuple[str, str]], chosen: int) -> Markup:
    choices = [tag("option", text, value=value, selected=i == chosen) for i, (value, text) in enumerate(names)]
    figures: list[Child] = [tag("div", tag("dt", label), tag("dd", data_figure=figure)) for figure, label in _FIGURES]
    return tag(
        "div",
        tag("label", f"Answer on the {name} ", tag("select", choices, name=name, data_control=name)),
        tag("output", tabindex=0, aria_live="off", aria_label=f"Text of the answer on the {name}"),
        tag(
            "svg",
            viewBox="0 0 1000 120",
            preserveAspectRatio="none",
            role="img",
            height=120,
            aria_label=f"Tokens shown against time, {name}",
        ),
        tag("dl", figures),
        data_lane=name,
    )


def _invented() -> Markup:
    inputs = [
        tag(
            "label",
            f"{n.label} ",
            tag(
                "input", type="number", name=n.name, min=_plain(n.low), max=_plain(n.high), step=_plain(n.step),
                value=_plain(n.value), data_control=n.name,
            ),
        )
        for n in _INVENTED
    ]  # fmt: skip
    return tag(
        "fieldset",
        tag("legend", _INVENTED_TITLE),
        tag("div", inputs, class_="inputs"),
    )


def _plain(value: float) -> str:
    return str(int(value)) if math.isclose(value, int(value)) else f"{value:g}"

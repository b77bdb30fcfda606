"""Numbers and verdicts as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from inferloop.pages.html import tag

SYMBOLS = {"pass": "\u2713", "fail": "\u2717", "inconclusive": "?", "void": "\u2298", "not declared": "\u2013"}
WORDS = {
    "pass": "Pass",
    "fail": "Fail",
    "inconclusive": "Inconclusive",
    "void": "Void",
    "not declared": "Not declared",
}
METRICS = {
    "ttft_ms": "TTFT",
    "response_ttft_ms": "Response TTFT",
    "steady_ttft_ms": "TTFT, steady state",
    "ttfat_ms": "First answer token",
    "response_ttfat_ms": "Response first answer token",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "icl_ms": "Chunk gap (ICL)",
    "max_gap_ms": "Longest gap",
    "blocked_ms": "Blocked reading",
    "ttlt_ms": "TTLT",
    "response_ttlt_ms": "Response TTLT",
    "session_ms": "Session",
    "queue_ms": "Queue",
    "schedule_delay_ms": "Send delay",
    "tokens_per_chunk": "Tokens per chunk",
    "goodput": "Goodput",
    "goodput_qps": "Goodput per second",
    "achieved_qps": "Achieved rate",
    "arrival_qps": "Arrival rate",
    "output_tok_s": "Output rate",
}
ABSENT = "\u2013"


def number(value: Any, digits: int = 3) -> str:
    """`digits` significant digits, thousands grouped, never an exponent; a dash for what is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return ABSENT
    if math.isinf(value):
        return "\u221e" if value > 0 else "-\u221e"
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(value: Any) -> str:
    """A share as a percentage."""
    return ABSENT if number(value) == ABSENT else f"{number(100.0 * value)} %"


def duration(seconds: Any) -> str:
    """Seconds as `820 ms`, `12.4 s` or `3 min 05 s`."""
    if number(seconds) in (ABSENT, "\u221e"):
        return number(seconds)
    if seconds < 1:
        return f"{number(seconds * 1000)} ms"
    if seconds < 120:
        return f"{number(seconds)} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def instant(wall_ns: Any) -> str | None:
    """Nanoseconds since the epoch as UTC."""
    if isinstance(wall_ns, bool) or not isinstance(wall_ns, int | float):
        return None
    try:
        return datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return None


def percentile(latency: Any, name: str) -> Markup | str:
    """One percentile of a latency of summary.json. A null says why it is null."""
    if not isinstance(latency, Mapping):
        return ABSENT
    value = latency.get(name)
    if value is not None:
        return number(value)
    if name in words(latency.get("infinite")):
        return tag("span", "\u221e", title="so many requests failed that this percentile is infinite")
    needed = latency.get("num_more_needed")
    missing = number(needed.get(name) if isinstance(needed, Mapping) else None)
    if missing != ABSENT:
        return tag("span", f"{missing} more needed", class_="soft", title="not certifiable with so few requests")
    return tag("span", "not certifiable", class_="soft")


def signs_of(difference: Any) -> dict[str, str]:
    """Of what is infinite in a difference, its interval's ends included: the sign of the side that is infinite, where
    only one is, as nothing that is resampled of it can be on the other side."""
    infinite = set(words(difference.get("infinite")))
    a, b = "a" in infinite, "b" in infinite
    if a == b:
        return {"difference": "\u00b1", "low": "-", "high": "+"}
    return dict.fromkeys(("difference", "low", "high"), "-" if a else "+")


def reuse_told(target: Any) -> str | None:
    """A sentence for a target of a comparison whose prefix cache did not do what the workload declares, or does not
    tell; None for one that did, and where nothing is known."""
    reuse = target.get("reuse")
    if not isinstance(reuse, Mapping) or reuse.get("verdict") == "as declared":
        return None
    label, declared, reason = target.get("label"), percent(reuse.get("declared")), reuse.get("reason")
    if reuse.get("verdict") == "not told":
        return f"{label} may or may not have got the declared prefix reuse of {declared}: {reason}"
    cached = percent(reuse.get("cached"))
    return (
        f"{label} did not get the declared prefix reuse of {declared}: {cached} of the input tokens came from its "
        f"cache, as {reason}"
    )


def error_class(name: str) -> str:
    """What happened to a request that did not succeed, in words where the class alone would mislead."""
    known = {"censored": "unfinished at the cut-off", "client": "client (the load generator's own fault)"}
    return known.get(name, name)


def words(value: Any) -> list[str]:
    """The items of a list as text; nothing for what is no list."""
    return [str(item) for item in value] if isinstance(value, list | tuple) else []


def verdict(value: Any) -> Markup:
    """A verdict as symbol and word; colour only repeats them."""
    known = value if isinstance(value, str) and value in SYMBOLS else "not declared"
    word = WORDS[known] if value in (known, None) else str(value)
    return tag(
        "span",
        tag("span", SYMBOLS[known], aria_hidden="true", class_="symbol"),
        Markup(" "),
        word,
        class_=f"verdict {known.replace(' ', '-')}",
    )

"""How many replicas the promise needs, with the formula and its numbers."""

from __future__ import annotations

from markupsafe import Markup

from inferloop.pages.html import Child, facts, join, tag
from inferloop.pages.text import ABSENT, number, percent, words
from inferloop.pages.verdicts import Json, mapping


def headline(summary: Json) -> str | None:
    """The outcome in one sentence."""
    capacity, replicas = mapping(summary.get("capacity")), mapping(summary.get("replicas"))
    parts = []
    if capacity.get("qps"):
        parts.append(f"One replica carries {number(capacity['qps'])} queries/s at the objective")
    needed, started = replicas.get("needed"), replicas.get("started")
    if isinstance(needed, int):
        words = f"the peak needs {needed} replica{'' if needed == 1 else 's'}"
        if isinstance(started, int):
            missing = max(0, needed - started)
            words += f", {started} started here" + (f", {missing} missing" if missing else "")
        parts.append(words)
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else None


def sizing(summary: Json, header: Json) -> Markup | None:
    """None when the run sized nothing."""
    capacity, replicas = mapping(summary.get("capacity")), mapping(summary.get("replicas"))
    if not capacity and not replicas:
        return None
    qps = mapping(mapping(mapping(header.get("contract")).get("traffic")).get("qps"))
    peak = replicas.get("peak_qps", replicas.get("peak", qps.get("peak")))
    needed, rho, spare = replicas.get("needed"), replicas.get("rho"), replicas.get("failure_headroom")
    parts: list[Child] = []
    if ABSENT not in (number(peak), number(capacity.get("qps")), number(rho)) and capacity["qps"] and rho:
        formula = f"\u2308peak / (c \u00b7 \u03c1)\u2309 + spare = \u2308{number(peak)} / ({number(capacity['qps'])}"
        formula += f" \u00b7 {number(rho)})\u2309 + {number(spare or 0)}"
        parts.append(tag("p", formula + (f" = {number(needed)}" if isinstance(needed, int) else "")))
    named = (("Replicas", {} if parts else replicas), ("Capacity", capacity))
    parts += [tag("p", f"{name}: {found['reason']}.") for name, found in named if found.get("reason")]
    parts += [tag("p", f"{reason}.") for reason in words(mapping(summary.get("fit")).get("reasons"))]
    pairs: list[tuple[str, Child]] = [
        ("Peak rate", _with(peak, "queries/s")),
        ("Capacity c", _with(capacity.get("qps"), "queries/s per replica")),
        ("95 % interval", _interval(mapping(capacity.get("interval")))),
        ("Measured", _between(capacity)),
        ("Utilization \u03c1", None if rho is None else percent(rho)),
        ("Spare replicas", _with(spare, "")),
        ("Needed", _with(needed, "")),
        ("At best, at worst", _range(replicas)),
        ("Started here", _with(replicas.get("started"), "")),
        ("Missing", _with(replicas.get("missing"), "")),
    ]
    return join([*parts, facts(pairs)])


def _with(value: object, unit: str) -> str | None:
    return None if value is None else f"{number(value)} {unit}".strip()


def _interval(found: Json) -> str | None:
    return f"{number(found['low'])} to {number(found['high'])} queries/s" if {"low", "high"} <= found.keys() else None


def _range(replicas: Json) -> str | None:
    if replicas.get("low") is None:
        return None
    return f"{number(replicas['low'])}, {number(replicas['high']) if replicas.get('high') is not None else 'unbounded'}"


def _between(capacity: Json) -> str | None:
    low, high = capacity.get("low"), capacity.get("high")
    if low is None:
        return None
    return (f"{number(low)} passes; " if low else "no rate passes; ") + (
        "no rate failed" if high is None else f"{number(high)} fails"
    )

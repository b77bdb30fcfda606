"""A comparison as tables for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from inferloop.pages.text import signs_of

_CALLED = {True: "[green]better[/]", False: "[red]worse[/]", None: "[dim]no difference[/]"}
_NOT_KNOWN = "[dim]not known[/]"
"""Where too little was answered for an interval of the difference: that is not to say that there is none."""


def points_table(summary: dict[str, Any]) -> Table:
    """One row per target and rate; dominated rows say by which one of the same rate."""
    table = _table("Targets at each rate (ms; a dash: too few requests to certify it)")
    for name in ("point", "n", "tok/s", "good/s", "TTFT p50", "p95", "TPOT p50", "p95", "errors"):
        table.add_column(name, justify="left" if name == "point" else "right")
    table.add_column("at this rate")
    for p in summary["points"]:
        rate = p["errors"]["rate"]
        table.add_row(
            p["name"],
            str(p["num_requests"]),
            number(p["output_tok_s"]),
            number(p["goodput_qps"]),
            *(_of(p[m], q) for m in ("ttft_ms", "tpot_ms") for q in ("p50", "p95")),
            "-" if rate is None else f"{rate:.1%}",
            _place(p),
        )
    return table


def differences_table(summary: dict[str, Any]) -> Table:
    """One row per target, rate and figure."""
    table = _table(
        "Differences (ms, tokens/s, requests/s), with 95 % intervals; beyond the noise floor they are called"
    )
    for name in ("target", "rate/s", "figure"):
        table.add_column(name)
    for name in ("first", "target", "difference", "interval", "noise floor"):
        table.add_column(name, justify="right")
    table.add_column("called")
    for d in summary["comparisons"]:
        i, signs = d["interval"], signs_of(d)
        table.add_row(
            d["target"],
            f"{d['offered_qps']:g}",
            d["figure"],
            _of(d, "a"),
            _of(d, "b"),
            _of(d, "difference", signed=signs["difference"]),
            "-" if i is None else " to ".join(_of(i, end, signed=signs[end]) for end in ("low", "high")),
            _of(d, "noise_floor"),
            _NOT_KNOWN if i is None else _CALLED[d["better"]],
        )
    return table


def _place(point: dict[str, Any]) -> str:
    full = "saturated, " if point["saturated"] else ""
    if point["dominated_by"]:
        return f"{full}dominated by {point['dominated_by']}"
    return full + ("on the front" if point["ranked_by"] else "not ranked")


def _of(told: dict[str, Any], name: str, *, signed: str = "") -> str:
    """A number of what may name some as infinite, with `signed`: requests that failed, or were never answered."""
    return f"{signed}\u221e" if name in told.get("infinite", ()) else number(told[name], signed=bool(signed))


def number(value: float | None, *, signed: bool = False) -> str:
    """Three significant digits, never an exponent."""
    if value is None:
        return "-"
    plus = "+" if signed else ""
    return f"{value:{plus}.0f}" if abs(value) >= 100 else f"{value:{plus}.3g}" if abs(value) >= 1e-3 else "0"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")

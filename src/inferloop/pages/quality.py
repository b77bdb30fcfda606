"""The quality gate: the suite's score and every case."""

from __future__ import annotations

from markupsafe import Markup

from inferloop.pages.html import Child, Column, facts, join, table, tag
from inferloop.pages.text import SYMBOLS, number, percent, verdict, words
from inferloop.pages.verdicts import Json, mapping, mappings


def quality(found: Json) -> Markup:
    """`found` is an eval summary: verdict, reasons, cases, score, interval, results."""
    cases, bounds, interval = mapping(found.get("cases")), mapping(found.get("bounds")), found.get("interval")
    suite = mapping(found.get("suite"))
    unscored = {name: n for name, n in cases.items() if name not in ("total", "scored") and n}
    span = (
        f"{percent(interval[0])} to {percent(interval[1])}"
        if isinstance(interval, list) and len(interval) == 2
        else None
    )
    pairs: list[tuple[str, Child]] = [
        ("Suite", suite.get("name")),
        ("Cases", f"{number(cases.get('scored'))} scored of {number(cases.get('total'))}"),
        ("No score", ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in unscored.items()) or None),
        ("Score", percent(found.get("score"))),
        ("Bounds", f"{percent(bounds.get('worst'))} to {percent(bounds.get('best'))}" if unscored and bounds else None),
        ("95 % interval", span),
        ("Detectable drop", percent(found["mde"]) if found.get("mde") is not None else None),
        ("Minimum", percent(found["minimum"]) if found.get("minimum") is not None else None),
    ]
    reasons = [tag("p", reason) for reason in words(found.get("reasons"))]
    return join([tag("p", verdict(found.get("verdict"))), *reasons, facts(pairs), _cases(found)])


def _cases(found: Json) -> Markup | None:
    results = mappings(found.get("results"))
    if not results:
        return None
    ordered = sorted(results, key=lambda r: r.get("score") == 1.0)
    columns = [Column("Case"), Column("Result"), Column("Why it matters", wide=True)]
    rows: list[list[Child]] = [[str(r.get("id")), _outcome(r), str(r.get("why") or "")] for r in ordered]
    if any(r.get("reason") for r in ordered):
        columns.insert(2, Column("What differed", wide=True))
        for row, r in zip(rows, ordered, strict=True):
            row.insert(2, str(r.get("reason") or ""))
    return table("Every case, those that did not pass first", columns, rows)


def _outcome(result: Json) -> Markup:
    score = result.get("score")
    if result.get("status") != "scored":
        name, word = "inconclusive", str(result.get("status") or "no score").replace("_", " ")
    else:
        name, word = ("pass", "right") if score == 1.0 else ("fail", "wrong" if score == 0.0 else number(score))
    symbol = tag("span", SYMBOLS[name], aria_hidden="true", class_="symbol")
    return tag("span", symbol, Markup(" "), word, class_=f"verdict {name}")

"""The other gates of a service and what stands behind them: protocol checks, real chats, notes."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from inferloop.pages.html import Child, Column, join, table, tag
from inferloop.pages.text import number, verdict, words
from inferloop.pages.verdicts import Json, mapping, mappings

_OUTCOMES = {"failed": "fail", "refused": "not declared"}


def gates_table(summary: Json) -> Markup | None:
    """Every gate with its verdict and reason. None when the run has none."""
    rows: list[list[Child]] = [
        [str(gate.get("name")), verdict(gate.get("verdict")), str(gate.get("reason") or "")]
        for gate in mappings(summary.get("gates"))
    ]
    columns = [Column("Gate"), Column("Verdict"), Column("Why", wide=True)]
    return table("Every gate of this run", columns, rows, hide_caption=True) if rows else None


def protocol_checks(summary: Json) -> Markup | None:
    """The checks of the API: those that did not pass as a table, the others by name."""
    checks = mappings(summary.get("protocol"))
    if not checks:
        return None
    rows: list[list[Child]] = []
    for check in checks:
        outcome = str(check.get("outcome"))
        if outcome != "passed":
            said = str(check.get("reason") or "") or ("refused by design" if outcome == "refused" else "")
            rows.append([str(check.get("name")), verdict(_OUTCOMES.get(outcome, "inconclusive")), said])
    passed = [str(check.get("name")) for check in checks if check.get("outcome") == "passed"]
    columns = [Column("Check"), Column("Result"), Column("What was found", wide=True)]
    return join(
        [
            tag("h3", "Protocol checks"),
            table("Checks that did not pass", columns, rows) if rows else None,
            tag("p", f"{len(passed)} passed: {', '.join(passed)}.") if passed else None,
        ]
    )


def proof_table(summary: Json) -> Markup | None:
    """The chats that were sent through the running service."""
    rows: list[list[Child]] = []
    for chat in mappings(mapping(summary.get("proof")).get("chats")):
        problem = str(chat.get("problem") or "")
        way = "streamed" if chat.get("streamed") else "whole"
        shown = verdict("fail" if problem else "pass")
        tokens = number(chat.get("num_output_tokens"))
        rows.append([str(chat.get("question")), shown, problem or str(chat.get("answer")), way, tokens])
    columns = [
        Column("Question"),
        Column("Result"),
        Column("Answer", wide=True),
        Column("Delivery"),
        Column("Tokens", numeric=True),
    ]
    return (
        table("Real chats through the gateway, each with its events at gateway and replica", columns, rows)
        if rows
        else None
    )


def notes(summary: Json, points: Sequence[Json]) -> Markup | None:
    """What the load generator had to say, of the run and of its points."""
    said = words(summary.get("notes"))
    for point in points:
        name = str(point.get("name") or point.get("mode") or "point")
        said += [f"{name}: {text}" for text in (*words(point.get("void")), *words(point.get("notes")))]
    return tag("ul", [tag("li", text) for text in dict.fromkeys(said)]) if said else None

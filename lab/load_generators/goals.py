"""What this project's load generator is meant to reach, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from lab.load_generators.load import NUM_TOKENS
from lab.load_generators.tools.aiperf import AiPerf
from lab.load_generators.tools.counter import Counter
from lab.load_generators.tools.guidellm import GuideLlm
from lab.load_generators.tools.ours import Inferloop
from lab.load_generators.tools.vllm import VllmBench

Row = dict[str, Any]

STREAMS = {"whole": "streams, one write each", "fast": "streams, a write per token"}
TIMES = ((VllmBench.name, 3.0), (GuideLlm.name, 10.0), (AiPerf.name, 10.0))
PLAIN_PER_S = 50_000.0
PACED_TOKENS_PER_S = 100_000.0
TTFT_ERROR_MS = {"p50": 0.3, "p99": 1.0}
LATE_P99_MS = 0.6
RSS_MB = 150.0
FULL, HALF_FULL = 0.9, 0.5
"""Of its core: a server that is busier than the first may be what limits a client, one below the second is not."""
LEEWAY = 1.5
"""By how much a client in C must get more of the server, for it not to be the limit."""


def mid(rows: Sequence[Row], tool: str, load: str, key: str) -> float | None:
    """The median of the rounds; None where there is none."""
    found = [row[key] for row in rows if (row["tool"], row["load"]) == (tool, load) and row.get(key) is not None]
    return statistics.median(found) if found else None


def is_limited(rows: Sequence[Row], load: str) -> bool:
    """Whether the null server, and not the client, may have set our rate on a load."""
    ours, most = mid(rows, Inferloop.name, load, "per_s"), mid(rows, Counter.name, load, "per_s")
    share = mid(rows, Inferloop.name, load, "server_share")
    if share is None or share < HALF_FULL:
        return False
    return share >= FULL if most is None or ours is None else most < LEEWAY * ours


def goals(rows: Sequence[Row]) -> str:
    """A Markdown table, a line for each goal: what is wanted, what was found, whether it is met."""
    lines = ["| goal | wanted | found | met |", "|---|---|---|---|"]
    ours = Inferloop.name

    def line(goal: str, wanted: float, found: float | None, *, at_most: bool = False, at_least: bool = False) -> None:
        met = found is not None and (found <= wanted if at_most else found >= wanted)
        said = (
            "yes" if met else "not measured" if found is None else "not shown, the server is full" if at_least else "no"
        )
        shown = "-" if found is None else ("at least " if at_least else "") + _number(found)
        lines.append(f"| {goal} | {'<=' if at_most else '>='} {_number(wanted)} | {shown} | {said} |")

    for load, name in STREAMS.items():
        reached, limited = mid(rows, ours, load, "per_s"), is_limited(rows, load)
        for tool, times in TIMES:
            theirs = mid(rows, tool, load, "per_s")
            line(f"{name}: times {tool}", times, reached / theirs if reached and theirs else None, at_least=limited)
    line("plain answers/s", PLAIN_PER_S, mid(rows, ours, "plain", "per_s"), at_least=is_limited(rows, "plain"))
    paced = mid(rows, ours, "paced", "per_s")
    line("paced, tokens/s", PACED_TOKENS_PER_S, None if paced is None else paced * NUM_TOKENS)
    for name, wanted in TTFT_ERROR_MS.items():
        mine = [r for r in rows if (r["tool"], r["load"]) == (ours, "200/s")]
        errors = [abs(r[f"ttft_{name}"] - r[f"true_{name}"]) for r in mine]
        error = statistics.median(errors) if errors else None
        line(f"200/s Poisson: TTFT {name} off the server's by, ms", wanted, error, at_most=True)
    line("200/s Poisson: sends late p99, ms", LATE_P99_MS, mid(rows, ours, "200/s", "late_p99"), at_most=True)
    sizes = [size for load in _loads(rows) if (size := mid(rows, ours, load, "rss_mb")) is not None]
    line("RSS of all processes on any load, MB", RSS_MB, max(sizes, default=None), at_most=True)
    lines += ["", "| the null server | its share of a core | a C client gets, times ours | what limits |"]
    lines.append("|---|---|---|---|")
    for load in _loads(rows):
        share, most = mid(rows, ours, load, "server_share"), mid(rows, Counter.name, load, "per_s")
        reached = mid(rows, ours, load, "per_s")
        if share is not None:
            limited = is_limited(rows, load)
            leeway = f"{most / reached:.2f}" if most and reached else "-"
            lines.append(
                f"| {load} | {share:.2f} | {leeway} | {'the server' if is_limited(rows, load) else 'not it'} |"
            )
    return "\n".join(lines)


def _loads(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["load"] for row in rows))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

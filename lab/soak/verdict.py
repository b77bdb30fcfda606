"""What is claimed at the end, and whether it held."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from lab.soak.ledger import Ledger
from lab.soak.server import Sample

MAX_GROWTH = 0.05
PRESSURE = "pressure was real"
MUST_HAVE_HAPPENED = (
    "inferloop_preemptions",
    "inferloop_prefix_cache_hits",
    "inferloop_prefix_cache_tier_hits",
    "inferloop_requests finish_reason=abort",
    "inferloop_requests finish_reason=stop",
    "inferloop_requests finish_reason=length",
)
"""Without these the run says nothing."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    found: str


def of(checks: list[Check]) -> str:
    """pass, fail, or void: nothing failed, but nothing was put to the test either."""
    failed = {check.name for check in checks if not check.passed}
    return "pass" if not failed else "void" if failed == {PRESSURE} else "fail"


def warm_up_s(run_s: float) -> float:
    """Until then memory may grow: allocators reach their working set, every size of a step has been seen once. A fifth
    of the run, at least 40 s, at most half of it."""
    return min(max(run_s / 5, 40.0), run_s / 2)


def memory(samples: list[Sample], *, from_s: float) -> Check:
    """Median of the last quarter after warm-up against that of the first. One that shrinks is flat, too."""
    rss = [sample.rss_mib for sample in samples if sample.t_s >= from_s]
    if len(rss) < 8:
        return Check("memory is flat", False, f"only {len(rss)} samples after warm-up")
    quarter = len(rss) // 4
    first, last = statistics.median(rss[:quarter]), statistics.median(rss[-quarter:])
    growth = last / first - 1
    return Check("memory is flat", growth <= MAX_GROWTH, f"{first:.0f} to {last:.0f} MiB, {growth:+.1%}")


def events(path: Path, ledger: Ledger) -> list[Check]:
    """Every request that the server has begun to answer left exactly one event, and it agrees with what the client saw.
    Of a client that left before the answer began nobody knows whether its request arrived."""
    rows: dict[str, list[dict[str, object]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["request_id"], []).append(row)
    begun = {sent.request_id for sent in ledger.sent.values() if sent.status is not None}
    missing = [name for name in begun if name not in rows]
    double = [name for name in begun if len(rows.get(name, ())) > 1]
    wrong = [
        f"{name}: {rows[name][0]['status']} instead of {ledger.sent[name].status}"
        for name in begun & rows.keys()
        if ledger.sent[name].complete and rows[name][0]["status"] != ledger.sent[name].status
    ]
    one = f"{len(begun)} requests begun, {len(missing)} without an event, {len(double)} with several"
    return [
        Check("one event per request", not missing and not double, one),
        Check("events tell the client's status", not wrong, "; ".join(wrong[:3]) or "all agree"),
    ]


def really_happened(counters: dict[str, float]) -> Check:
    missing = [name for name in MUST_HAVE_HAPPENED if not counters.get(name)]
    found = ", ".join(f"{name.removeprefix('inferloop_')} {counters.get(name, 0):.0f}" for name in MUST_HAVE_HAPPENED)
    return Check(PRESSURE, not missing, found)


def log_is_clean(path: Path) -> Check:
    faults = re.findall(r"request \S+ failed: \w+|Traceback|the engine failed|Task exception", path.read_text())
    return Check("no fault in the log", not faults, ", ".join(sorted(set(faults))[:5]) or "none")

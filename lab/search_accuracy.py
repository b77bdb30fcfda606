"""How good a search for the capacity is, against simulated servers whose capacity is known.

    python -m lab.search_accuracy [--kinds mm1,md1,batching] [--num 60] [--first 0] [--budget-s 170]

Per kind: how often there was an interval at all (a rate certified on each side of the edge), how often the interval
held the truth, how wide it was, and how far off the capacity itself.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import numpy as np
from lab.simulated_servers import Batching, Queue, Regular, Server, search

Made = tuple[Server, np.random.Generator]


def mm1(seed: int, drift: float = 0.0) -> Made:
    """Capacity at 40 to 75 % of what it completes."""
    rng = np.random.default_rng(seed)
    mu = float(np.exp(rng.uniform(math.log(4), math.log(40))))
    share = rng.uniform(0.4, 0.75)
    return Queue(mu, math.log(20) / (mu * (1 - share)), drift), rng


def md1(seed: int) -> Made:
    """Capacity at 54 to 88 %."""
    rng = np.random.default_rng(3000 + seed)
    mu = float(np.exp(rng.uniform(math.log(4), math.log(40))))
    return Regular(mu, (2.5, 4.0, 8.0)[seed % 3]), rng


def batching(seed: int, drift: float = 0.0) -> Made:
    rng = np.random.default_rng(1000 + seed)
    shape = Batching((16, 32)[seed % 2], 1.0, limit_answers=(1.0, 2.0, 3.0)[seed % 3])
    top_qps = float(np.exp(rng.uniform(math.log(20), math.log(80))))
    made = Batching(shape.slots, shape.top_qps / top_qps, limit_answers=shape.limit_answers, drift=drift)
    return made, rng


KINDS: dict[str, Callable[[int], Made]] = {
    "mm1": mm1,
    "md1": md1,
    "batching": batching,
    "mm1-drift": lambda seed: mm1(seed, 0.04),
    "batching-drift": lambda seed: batching(seed, 0.04),
}


def one(kind: str, seed: int, budget_s: float) -> dict[str, Any]:
    server, rng = KINDS[kind](seed)
    found = search(server, rng, budget_s=budget_s)
    capacity = found.frontier.capacity()
    interval = capacity.interval
    balances = [p.balance.verdict if p.balance else "none" for p in found.frontier.points]
    return {
        "kind": kind,
        "seed": seed,
        "truth": server.capacity,
        "qps": capacity.qps,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "steps": [f"{step.role[0]}{step.qps / server.capacity:.2f}x{step.num_requests}" for step in found.steps],
        "balances": Counter(balances),
        "done": found.done.reason if found.done else "",
    }


def told(rows: list[dict[str, Any]]) -> str:
    known = [r for r in rows if r["low"] is not None]
    if not known:
        return f"{len(rows)} searches, no interval"
    off = [r["qps"] / r["truth"] - 1 for r in known]
    widths = [(r["high"] - r["low"]) / 2 / r["qps"] for r in known]
    held = sum(r["low"] <= r["truth"] <= r["high"] for r in known)
    return (
        f"certified {len(known)}/{len(rows)}, holds {held / len(known):.0%}, half-width {median(widths):.1%} "
        f"(mean {mean(widths):.0%}), bias {mean(off):+.1%}, median error {median(map(abs, off)):.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--num", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=170.0)
    parser.add_argument("--rows", action="store_true", help="Print what each search did, as JSON.")
    given = parser.parse_args()
    for kind in given.kinds.split(","):
        rows = [one(kind, seed, given.budget_s) for seed in range(given.first, given.first + given.num)]
        if given.rows:
            for row in rows:
                sys.stdout.write(json.dumps(row) + "\n")
        else:
            sys.stdout.write(f"{kind:15} {told(rows)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

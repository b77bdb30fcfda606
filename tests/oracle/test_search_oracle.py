"""The search against servers whose capacity is known: M/M/1, which its latency limits, and continuous batching, which
is quick until it is full and then completes no more."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from lab.simulated_servers import Batching, Found, Queue, Server, measure, search

from inferloop.bench.decide import Step
from inferloop.measure.crossing import Crossing


def queue(seed: int) -> tuple[Queue, np.random.Generator]:
    rng = np.random.default_rng(seed)
    mu = float(np.exp(rng.uniform(math.log(4), math.log(40))))
    share = rng.uniform(0.4, 0.75)
    return Queue(mu, math.log(20) / (mu * (1 - share))), rng


def batching(seed: int) -> tuple[Batching, np.random.Generator]:
    rng = np.random.default_rng(1000 + seed)
    shape = Batching((16, 32)[seed % 2], 1.0, limit_answers=(1.0, 2.0, 3.0)[seed % 3])
    top_qps = float(np.exp(rng.uniform(math.log(20), math.log(80))))
    return Batching(shape.slots, shape.top_qps / top_qps, limit_answers=shape.limit_answers), rng


def share_inside(told: Sequence[tuple[Server, Crossing]]) -> float:
    return sum(c.low <= s.capacity <= c.high for s, c in told) / len(told)


def told(server: Server, found: Found) -> Crossing | None:
    capacity = found.frontier.capacity()
    interval = capacity.interval
    assert interval is None or interval.low <= capacity.qps <= interval.high
    return interval


def test_the_interval_holds_the_capacity_of_a_queue() -> None:
    runs = [(server, told(server, search(server, rng, budget_s=170.0))) for server, rng in map(queue, range(60))]
    known = [(server, c) for server, c in runs if c is not None]
    assert len(known) >= 48
    assert share_inside(known) >= 0.93
    off = [c.qps / s.capacity - 1 for s, c in known]
    assert sorted(map(abs, off))[len(off) // 2] <= 0.12
    assert abs(sum(off) / len(off)) <= 0.04, "short windows flatter; what is told does not"
    widths = sorted(c.half_width for _, c in known)
    assert widths[len(widths) // 2] <= 0.32


def test_the_interval_holds_the_capacity_of_a_batching_server_and_is_narrow() -> None:
    runs = [(server, search(server, rng, budget_s=155.0)) for server, rng in map(batching, range(48))]
    known = [(server, c) for server, found in runs if (c := told(server, found)) is not None]
    assert len(known) >= 44
    assert share_inside(known) >= 0.9
    widths = sorted(c.half_width for _, c in known)
    assert widths[len(widths) // 2] <= 0.15
    for server, found in runs:
        for p in found.frontier.points:
            if p.verdict == "pass" and not p.is_scout and p.balance is not None:
                assert p.offered_qps <= (1 + p.balance.tolerance) * server.top_qps, "5 % where it has 1600 requests"


def test_a_level_is_called_saturated_where_it_is() -> None:
    """In windows that a search certifies with: 1500 requests."""
    verdicts: dict[float, list[str]] = {}
    for share in (0.8, 1.3):
        for seed in range(40):
            server, rng = batching(seed)
            qps = share * server.top_qps
            point = measure(server, Step(qps, "certified", 1500, 1500 / qps), rng)
            assert point.balance is not None
            verdicts.setdefault(share, []).append(point.balance.verdict)
    assert verdicts[0.8].count("saturated") <= 1
    assert verdicts[0.8].count("sustained") >= 30
    assert verdicts[1.3].count("saturated") >= 38
    assert verdicts[1.3].count("sustained") == 0

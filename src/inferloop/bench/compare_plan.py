"""What a comparison measures, and for how long. Decides only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inferloop.bench.decide import FIRST_SHARE, on_grid
from inferloop.core.errors import UsageError
from inferloop.core.slo import Slo
from inferloop.measure.quantiles import min_samples

DEFAULT_ROUNDS = 4
DEFAULT_BUDGET_S = 900.0
LEAST_ROUNDS = 2
"""One pair has no scatter."""
LEAST_REQUESTS = 8
"""Due in a window on average: with fewer, some windows have none."""
_SPARE = 1.15
"""Arrivals are random: so many more requests are planned than a p95 takes."""
_SHORTEST_S, _LONGEST_S = 4.0, 30.0
_NEAR = 1.3
"""Rates closer than this say the same."""
_MOST_RATES = 3
_LEAST_DRAIN_S, _MOST_DRAIN_S, _PATIENCE = 5.0, 30.0, 1.2


def choose_rates(peak: float, bursts: Mapping[str, float]) -> tuple[float, ...]:
    """The contract's peak, and a share of what each target completes of a burst, so that every one has a rate which
    keeps it busy without filling it; rates that lie close together are one. Rising."""
    wanted = sorted(on_grid(FIRST_SHARE * qps) for qps in bursts.values())
    near, found = _NEAR, [peak]
    while True:
        found = [peak]
        for rate in wanted:
            if all(max(rate, other) / min(rate, other) > near for other in found):
                found.append(rate)
        if len(found) <= _MOST_RATES:
            return tuple(sorted(found))
        near *= _NEAR


@dataclass(frozen=True, slots=True)
class Plan:
    """`windows_s` are the lengths of the windows at each rate; `expected_s` is what all rounds take."""

    num_rounds: int
    windows_s: Mapping[float, float]
    expected_s: float
    notes: tuple[str, ...] = ()


def plan_windows(
    rates: Sequence[float],
    num_per_round: int,
    beside_s: Mapping[float, float],
    *,
    num_rounds: int | None = None,
    window_s: float | None = None,
    left_s: float | None = None,
) -> Plan:
    """So long that all rounds together can certify a p95 at each rate, as far as `left_s` (None: no bound) allows:
    first windows get shorter, then rounds fewer. What is given stays as it is, but for windows in which too few
    requests would be due. `num_per_round` windows are measured at each rate in a round, which take `beside_s` of that
    rate beside their lengths, all together.

    Raises UsageError when the least that says anything takes longer than `left_s`.
    """
    notes = []
    rounds = num_rounds or DEFAULT_ROUNDS
    least = {rate: max(window_s or _SHORTEST_S, LEAST_REQUESTS / rate) for rate in rates}
    most = dict(least)
    if window_s is None:
        full = _SPARE * min_samples(0.95) / rounds
        most = {rate: max(least[rate], min(_LONGEST_S, full / rate)) for rate in rates}
    longer = [rate for rate in rates if window_s is not None and least[rate] > window_s]
    if longer:
        told = ", ".join(f"{least[rate]:.3g} s at {rate:g}/s" for rate in longer)
        notes.append(f"windows are longer than asked, {told}, so that {LEAST_REQUESTS} requests are due in each")

    def takes_s(count: int, windows: Mapping[float, float]) -> float:
        return count * sum(num_per_round * window_s + beside_s[rate] for rate, window_s in windows.items())

    if left_s is not None and takes_s(rounds, most) > left_s:
        if num_rounds is None:
            one_s = takes_s(1, least)
            rounds = max(LEAST_ROUNDS, min(rounds, int(left_s / one_s)))
        shortest_s = takes_s(rounds, least)
        if shortest_s > left_s:
            raise UsageError(
                f"{rounds} rounds at {', '.join(f'{r:g}' for r in rates)}/s take {shortest_s:.0f} s at least, and "
                f"{max(0.0, left_s):.0f} s are left: give a larger --budget-s, or fewer --rates or --targets"
            )
        longest_s = takes_s(rounds, most)
        share = 1.0 if longest_s <= shortest_s else min(1.0, (left_s - shortest_s) / (longest_s - shortest_s))
        most = {rate: least[rate] + share * (most[rate] - least[rate]) for rate in rates}
        notes.append(f"the budget left room for {rounds} rounds of " + _told(most))
    return Plan(rounds, most, takes_s(rounds, most), tuple(notes))


def _told(windows: Mapping[float, float]) -> str:
    return ", ".join(f"{window_s:.3g} s at {rate:g}/s" for rate, window_s in windows.items())


def drain_s(slo: Slo, answer_s: float) -> float:
    """How long what is in flight is waited for when a window ends: whoever takes longer has missed every objective, or,
    without one, takes ten times as long as alone."""
    limits = [o.limit / 1e3 for o in slo.objectives if o.metric in ("ttlt_ms", "ttft_ms", "ttfat_ms")]
    patience_s = _PATIENCE * max(limits) if limits else 10.0 * answer_s
    return min(_MOST_DRAIN_S, max(_LEAST_DRAIN_S, patience_s)) if math.isfinite(patience_s) else _MOST_DRAIN_S

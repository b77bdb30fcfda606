"""Which rate to measure next. Decides only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from inferloop.measure.frontier import FrontierPoint, margin_crossing

FIRST_SHARE = 0.7
_CLOSE_ENOUGH = 1.15
_STEP_UP = 1.4
_MOST_OVER_BURST = 2.0
_LEAST_OF_SERIAL = 0.1


def next_rate(
    points: Sequence[FrontierPoint], *, serial_qps: float, burst_qps: float, first_qps: float | None = None
) -> float | None:
    """The rate whose verdict narrows the capacity most; None when it is bracketed closely enough.

    `serial_qps` and `burst_qps` are the completions of one and of many in flight: without an objective the capacity
    lies between them. Points near the knee are worth most, so the search starts at `first_qps` (close below the burst's
    rate by default) and then halves the bracket in the logarithm, or goes to where the margin crosses zero. An
    undecided point counts as too high: lower rates are measured until one is certain.
    """
    top = max(serial_qps, burst_qps)
    if not points:
        return FIRST_SHARE * burst_qps if first_qps is None else first_qps
    failing = sorted((p for p in points if p.verdict != "pass"), key=lambda p: p.offered_qps)
    high = failing[0] if failing else None
    passing = [p for p in points if p.verdict == "pass" and (high is None or p.offered_qps < high.offered_qps)]
    low = max(passing, key=lambda p: p.offered_qps, default=None)
    if high is None:
        assert low is not None
        rate = low.offered_qps * _STEP_UP
        return rate if rate <= _MOST_OVER_BURST * top else None
    if low is None:
        rate = high.offered_qps / 2
        return rate if rate >= _LEAST_OF_SERIAL * min(serial_qps, burst_qps) else None
    if high.offered_qps / low.offered_qps <= _CLOSE_ENOUGH:
        return None
    middle = math.sqrt(low.offered_qps * high.offered_qps)
    crossing = margin_crossing(low, high)
    if crossing is None:
        return middle
    # Keep off the ends: a point there would narrow nothing.
    edge = math.sqrt(math.sqrt(high.offered_qps / low.offered_qps))
    return min(max(crossing, low.offered_qps * edge), high.offered_qps / edge)

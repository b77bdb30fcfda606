"""What to measure next: short scouts close in on the rate at which the objectives are used up, then the two rates that
bracket it are measured for long. Decides only.

Rates come from a grid, so that two runs of one service meet the same ones, with the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from inferloop.measure.frontier import Frontier, FrontierPoint

Role = Literal["scout", "certified"]
GRID = 48
"""Rates per decade: steps of 4.9 %."""
FIRST_SHARE = 0.7
_STEP_UP = 1.4
_MOST_OVER_TOP = 2.0
_LEAST_OF_SERIAL = 0.1
_NEAR = 1.3
"""A bracket this narrow is left to the certified points."""
_BELOW, _ABOVE = 1.2, 1.12
"""How far from the edge the certified points lie: nearer, neither could be certain; further, they tell less of it. To
pass takes more than to fail."""
_FURTHER = 1.15
_APART = 1.6
"""Certified points further from each other do not bracket it."""
_NUM_CERTIFIED = 2
_SCOUT_SHARE = 0.35
_LEAST_REQUESTS = 24
_LONGEST = 4.0
"""Times the floor: what a certified point has at most."""
AIM = 0.15
"""Half-width of the capacity's interval, as a share."""


@dataclass(frozen=True, slots=True)
class Step:
    """A rate to be measured with `num_requests`, for `window_s` seconds."""

    qps: float
    role: Role
    num_requests: int
    window_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """`is_short`: time or points ran out before the search was over."""

    reason: str
    is_short: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """What the search may take. `floor` requests can certify the objectives' quantiles; `overhead_s` is what a point
    takes beside its window; `first_qps` is where to begin; `search_s` is for all points together."""

    serial_qps: float
    burst_qps: float
    first_qps: float
    num_points: int
    floor: int
    overhead_s: float
    search_s: float


def next_step(frontier: Frontier, num_measured: int, left_s: float, limits: Limits) -> Step | Done:
    """`frontier` has the points so far whose numbers may be used, `num_measured` counts void ones too; `left_s` is for
    the whole rest of the search."""
    num_left = limits.num_points - num_measured
    if num_left <= 0:
        return Done("all points are measured", is_short=True)
    num_scouts = max(1, limits.num_points - _NUM_CERTIFIED)
    scouting = num_left > _NUM_CERTIFIED or not frontier.points
    rate = _scout_rate(frontier, limits) if scouting else None
    if rate is not None:
        share = _SCOUT_SHARE if limits.num_points > _NUM_CERTIFIED else 1.0
        window_s = max(share * limits.search_s / num_scouts - limits.overhead_s, _LEAST_REQUESTS / rate)
        if window_s + limits.overhead_s > left_s:
            return Done(f"the budget left no time to measure {rate:.3g} queries/s", is_short=True)
        return _step(rate, "scout", window_s, limits)
    return _certify(frontier, num_left, left_s, limits)


def _scout_rate(frontier: Frontier, limits: Limits) -> float | None:
    """None when the edge is known closely enough, or lies outside what may be asked."""
    points = frontier.points
    if not points:
        return on_grid(limits.first_qps)
    low, high = _bracket(points)
    if high is None:
        assert low is not None
        up = on_grid(low * _STEP_UP)
        return up if up <= _MOST_OVER_TOP * max(limits.serial_qps, limits.burst_qps) else None
    if low is None:
        # Half way to one at a time, in the logarithm; below that by halves.
        down = on_grid(min(math.sqrt(high * limits.serial_qps), high / _STEP_UP))
        return down if down >= _LEAST_OF_SERIAL * min(limits.serial_qps, limits.burst_qps) else None
    if high / low <= _NEAR:
        return None
    fitted = frontier.crossing()
    edge = math.sqrt(math.sqrt(high / low))  # a point at an end would narrow nothing
    middle = math.sqrt(low * high) if fitted is None else min(max(fitted.qps, low * edge), high / edge)
    return on_grid(middle)


def _certify(frontier: Frontier, num_left: int, left_s: float, limits: Limits) -> Step | Done:
    points = frontier.points
    long = Frontier(tuple(p for p in points if not p.is_scout))
    capacity = long.capacity()
    has_low, has_high = capacity.low > 0, capacity.high is not None
    fitted = frontier.crossing()
    low, high = _bracket(points)
    edge = fitted.qps if fitted is not None else (low or 0.0) if high is None else high if low is None else None
    if edge is None:
        edge = math.sqrt((low or 1.0) * (high or 1.0))
    if has_low and has_high and (capacity.high or 0.0) / capacity.low <= _APART:
        if fitted is None or fitted.half_width <= AIM:
            return Done("the edge is bracketed")
        rate = on_grid(edge)  # where a point tells most of it
    elif high is None and has_low and capacity.low >= (low or 0.0) / 1.02:
        return Done("no measured rate failed")
    elif not has_low or edge / capacity.low > _APART:
        rate = on_grid(edge / _BELOW if high is not None else edge)
        for p in sorted(points, key=lambda p: -p.offered_qps):  # long ones below which nothing was certain
            if p.verdict == "inconclusive" and not p.is_scout and p.offered_qps <= rate * 1.02:
                rate = on_grid(p.offered_qps / _FURTHER)
        if rate < _LEAST_OF_SERIAL * min(limits.serial_qps, limits.burst_qps):
            return Done("no rate this low can be asked")
    else:
        rate = on_grid(edge * _ABOVE)
        for p in points:
            if p.verdict == "inconclusive" and not p.is_scout and p.offered_qps >= rate / 1.02:
                rate = on_grid(p.offered_qps * _FURTHER)
    share_s = left_s / min(num_left, max(1, _NUM_CERTIFIED - has_low - has_high))
    least_s = limits.floor / rate
    window_s = min(max(share_s - limits.overhead_s, least_s), _LONGEST * least_s)
    if window_s + limits.overhead_s > left_s:
        return Done(f"the budget left no time to certify {rate:.3g} queries/s", is_short=True)
    return _step(rate, "certified", window_s, limits)


def _bracket(points: Sequence[FrontierPoint]) -> tuple[float | None, float | None]:
    """(the highest rate that seems to keep the objectives below the lowest that does not, the latter). A service is
    slower at a higher rate, so where noise says otherwise the cut is made that contradicts the fewest points."""
    kept = [_seems_kept(p) for p in points]
    wrong = [kept[:k].count(False) + kept[k:].count(True) for k in range(len(points) + 1)]
    cut = wrong.index(min(wrong))
    low = points[cut - 1].offered_qps if cut else None
    return low, points[cut].offered_qps if cut < len(points) else None


def _seems_kept(point: FrontierPoint) -> bool:
    if point.verdict in ("pass", "fail"):
        return point.verdict == "pass"
    return point.margin is not None and point.margin > 0


def _step(rate: float, role: Role, window_s: float, limits: Limits) -> Step:
    most = math.ceil(limits.floor * _LONGEST)
    return Step(rate, role, min(most, max(_LEAST_REQUESTS, math.ceil(rate * window_s))), window_s)


def on_grid(qps: float) -> float:
    """The nearest of GRID rates per decade, in three digits."""
    return float(f"{10 ** (round(math.log10(qps) * GRID) / GRID):.3g}")

"""What to measure next: short scouts close in on the edge of what the service carries, then a rate on each side of it
is measured for long, and what time is left goes to more such levels. Decides only.

Rates come from a grid, so that two runs of one service meet the same ones, with the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from inferloop.measure.crossing import Crossing
from inferloop.measure.frontier import CLOSE, Frontier, FrontierPoint
from inferloop.measure.quantiles import CONFIDENCE, binomial_cdf

Role = Literal["scout", "certified"]
GRID = 48
"""Rates per decade: steps of 4.9 %."""
FIRST_SHARE = 0.7
LEAD_SHARE = 0.1
"""Of a window, that is sent before it and not measured: a loaded queue takes long to forget that it started empty."""
_STEP_UP = 1.4
_MOST_OVER_TOP = 2.0
_LEAST_OF_SERIAL = 0.1
_NEAR = 1.3
"""A bracket this narrow is left to the certified points."""
_BELOW = _ABOVE = 1.12
"""How far from the edge the certified points lie: nearer, neither could be certain; further, they tell less of it."""
_FURTHER = 1.1
_NUM_CERTIFIED = 2
_SCOUT_SHARE = 0.35
_NUM_SCOUTS = 4
"""That share the scouts' time."""
_NARROWING = 80
"""Requests that a scout should have, to narrow what is a bracket already: of a slow service fewer do."""
_NUM_REFINING = 2
"""Levels that share what time is left, where nothing was saturated: long ones know more than many short ones. What a
service sustains drifts, and is better seen often."""
_LEAST_REQUESTS = 24
_SCOUT_FLOORS, _FLOORS = 2.0, 4.0
"""Times the floor: what a scout and a certified point have at most."""
_TELLING = 1500
"""Requests with which 5 % too many are told from 5 % too few: their arrivals scatter by 1 / sqrt(n), a part of which
the arrivals themselves explain."""
AIM = 0.05
"""Half-width of the capacity's interval, as a share, that no more time is spent on."""


@dataclass(frozen=True, slots=True)
class Step:
    """A rate to be measured with `num_requests`, for `window_s` seconds."""

    qps: float
    role: Role
    num_requests: int
    window_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """`is_short`: time or points ran out before a certified rate lay on each side of the edge."""

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
    tail: float = 0.05
    """The least share of requests that an objective lets be over its limit."""

    @property
    def least_qps(self) -> float:
        """Lower rates are not asked."""
        return _LEAST_OF_SERIAL * min(self.serial_qps, self.burst_qps)


def next_step(frontier: Frontier, num_measured: int, left_s: float, limits: Limits) -> Step | Done:
    """`frontier` has the points so far whose numbers may be used, `num_measured` counts void ones too; `left_s` is for
    the whole rest of the search."""
    num_left = limits.num_points - num_measured
    if num_left <= 0:
        return Done("all points are measured", is_short=not _is_bracketed(frontier))
    scouting = num_left > _NUM_CERTIFIED or not frontier.points
    rate = _scout_rate(frontier, limits) if scouting else None
    if rate is None:
        return _certify(frontier, num_left, left_s, limits)
    share_s = limits.search_s * (_SCOUT_SHARE / _NUM_SCOUTS if limits.num_points > _NUM_CERTIFIED else 1.0)
    window_s = min(_window_s(share_s, limits), _SCOUT_FLOORS * limits.floor / rate)
    window_s = max(window_s, _LEAST_REQUESTS / rate)
    if window_s > _window_s(left_s, limits):
        return Done(f"the budget left no time to measure {rate:.3g} queries/s", is_short=True)
    return Step(rate, "scout", max(_LEAST_REQUESTS, math.ceil(rate * window_s)), window_s)


def _scout_rate(frontier: Frontier, limits: Limits) -> float | None:
    """None when the edge is known closely enough, or lies outside what may be asked."""
    points = frontier.points
    if not points:
        return on_grid(limits.first_qps)
    low, high = _bracket(points)
    if low is not None and high is not None:
        num_useful = _SCOUT_SHARE * limits.search_s * math.sqrt(low * high) / _NARROWING
        if num_useful < _NUM_SCOUTS and len(points) >= max(1.0, num_useful):
            return None
    if high is None:
        assert low is not None
        up = on_grid(max(low, *(p.asked_qps or 0.0 for p in points)) * _STEP_UP)
        return up if up <= _MOST_OVER_TOP * max(limits.serial_qps, limits.burst_qps) else None
    if low is None:
        # Half way to one at a time, in the logarithm; below that by halves.
        down = on_grid(min(math.sqrt(high * limits.serial_qps), high / _STEP_UP))
        return down if down >= limits.least_qps else None
    if high / low <= _NEAR:
        return None
    edge = frontier.edge()
    if edge is not None and edge.limit == "throughput":
        return None  # what a saturated service completes is known at once
    inside = math.sqrt(math.sqrt(high / low))  # a point at an end would narrow nothing
    middle = math.sqrt(low * high) if edge is None else min(max(edge.qps, low * inside), high / inside)
    return on_grid(middle)


def _certify(frontier: Frontier, num_left: int, left_s: float, limits: Limits) -> Step | Done:
    points, long = frontier.points, _long(frontier)
    capacity = long.capacity()
    found = frontier.edge()
    low, high = _bracket(points)
    edge = found.qps if found is not None else math.sqrt((low or high or 1.0) * (high or low or 1.0))
    has_low = capacity.low > 0 and edge / capacity.low <= CLOSE
    has_high = capacity.high is not None
    is_over = _is_bracketed(frontier)
    if is_over and (found is None or found.half_width <= AIM):
        return Done("the edge is bracketed")
    if is_over:
        assert found is not None
        rate = on_grid(edge * _ABOVE if found.limit == "throughput" else edge)  # where a point tells most of it
    elif high is None and has_low and capacity.low >= (low or 0.0) / 1.02:
        return Done("no measured rate failed")
    elif not has_low:
        rate = on_grid(_below(edge, found, left_s, limits) if high is not None else edge)
        for p in sorted(points, key=lambda p: -p.offered_qps):  # long ones below which nothing was certain
            if p.verdict != "pass" and not p.is_scout and p.offered_qps <= rate * 1.02:
                rate = on_grid(p.offered_qps / _FURTHER)
        if rate < limits.least_qps:
            return Done("no rate this low can be asked")
    else:
        rate = on_grid(edge * _ABOVE)
        for p in points:
            if p.verdict != "fail" and not p.is_scout and p.offered_qps >= rate / 1.02:
                rate = on_grid(p.offered_qps * _FURTHER)
    least_s = limits.floor / rate
    most = max(_FLOORS * limits.floor, _TELLING) / rate
    num_shares = num_left if is_over else max(1, min(num_left, 3 - has_low - has_high))
    if is_over and found is not None and found.limit == "latency" and frontier.sustained() is None:
        num_shares, most = min(num_left, _NUM_REFINING), math.inf
    window_s = min(_window_s(left_s / num_shares, limits), most)
    window_s = max(window_s, least_s)
    if window_s > _window_s(left_s, limits):
        return Done(f"the budget left no time to certify {rate:.3g} queries/s", is_short=not is_over)
    return Step(rate, "certified", math.ceil(rate * window_s), window_s)


def _window_s(total_s: float, limits: Limits) -> float:
    """How long a level may be measured that takes `total_s` altogether."""
    return (total_s - limits.overhead_s) / (1 + LEAD_SHARE)


def _below(edge: float, found: Crossing | None, left_s: float, limits: Limits) -> float:
    """A rate that can be certified to keep the objectives: a little below the edge, and where latency is so much
    shorter than its limit that few enough requests are over it by chance. Tails are taken for exponential."""
    if found is None or found.slope >= 0:
        return edge / _BELOW
    n = min(max(_FLOORS * limits.floor, _TELLING), max(limits.floor, edge * left_s / 3))
    most = max(
        (k for k in range(int(n * limits.tail) + 1) if binomial_cdf(k, int(n), limits.tail) <= 1 - CONFIDENCE),
        default=0,
    )
    expected = (math.sqrt(most + 1.25) - 0.5) ** 2  # of which one standard deviation more is `most` + 1
    headroom = math.log(expected / n) / math.log(limits.tail) - 1
    return min(edge / _BELOW, max(edge + headroom / found.slope, edge / CLOSE))


def _long(frontier: Frontier) -> Frontier:
    return Frontier(tuple(p for p in frontier.points if not p.is_scout))


def _is_bracketed(frontier: Frontier) -> bool:
    """By certified points that lie close enough together."""
    capacity = _long(frontier).capacity()
    return capacity.low > 0 and capacity.high is not None and capacity.high / capacity.low <= CLOSE


def _bracket(points: Sequence[FrontierPoint]) -> tuple[float | None, float | None]:
    """(the highest rate that seems to be kept below the lowest that does not, the latter). A service is slower at a
    higher rate, so where noise says otherwise the cut is made that contradicts the fewest points."""
    kept = [_seems_kept(p) for p in points]
    wrong = [kept[:k].count(False) + kept[k:].count(True) for k in range(len(points) + 1)]
    cut = wrong.index(min(wrong))
    low = points[cut - 1].offered_qps if cut else None
    return low, points[cut].offered_qps if cut < len(points) else None


def _seems_kept(point: FrontierPoint) -> bool:
    if point.verdict in ("pass", "fail"):
        return point.verdict == "pass"
    if point.balance is not None and point.balance.growth > point.balance.tolerance:
        return False
    return point.margin is not None and point.margin > 0


def on_grid(qps: float) -> float:
    """The nearest of GRID rates per decade, in three digits."""
    return float(f"{10 ** (round(math.log10(qps) * GRID) / GRID):.3g}")

"""What one replica can carry: points of (rate, verdict, margin) and the capacity at the objective between them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from inferloop.measure.balance import Balance
from inferloop.measure.crossing import Crossing, Level, crossing
from inferloop.measure.sustained import Sustained, is_saturated, sustained_rate
from inferloop.measure.verdict import Verdict

CLOSE = 1.6
"""Certified rates further from each other do not bracket a capacity."""
_DRIFTS = 2.0
"""Standard deviations of the service's speed."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """An offered rate and how the objectives fared there. `margin` as in measure.verdict, None when unknown; its 95 %
    interval as in measure.margin, None where there is none. `arrival_qps` is what chance made of the offered rate."""

    offered_qps: float
    achieved_qps: float | None
    output_tok_s: float | None
    verdict: Verdict
    margin: float | None
    margin_low: float | None = None
    margin_high: float | None = None
    arrival_qps: float | None = None
    is_scout: bool = False
    """Too short to be certain of: it helps to find the edge, and stands back where a longer level says otherwise."""
    balance: Balance | None = None
    """Arrivals against completions, where the load sets the rate."""
    asked_qps: float | None = None
    """The rate that was asked for, of which a short window of conversations brings much less."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests per second of one replica at the objective.

    `low` is the highest measured rate that passes below every failing one; `high` the lowest failing rate, None when no
    rate failed (the capacity is at least `low`). `qps` is found as `method` says: measured | fitted | sustained |
    interpolated | saturated | none | undecided (rates below the failing ones may pass, but not certainly). It is never
    above `high`, and below `low` only where one level passed and all together say less (there is an `interval` then).
    `monotone` is False when a rate above a failing one passed: noise, or a warm cache. `interval` is that of the edge,
    see measure.crossing, and holds `qps`.
    """

    qps: float
    low: float
    high: float | None
    method: str
    monotone: bool
    reason: str
    interval: Crossing | None = None


@dataclass(frozen=True, slots=True)
class Frontier:
    """Points in ascending order of offered rate. `idle_margin` is that of one request at a time, None when unknown."""

    points: tuple[FrontierPoint, ...]
    idle_margin: float | None = None

    @classmethod
    def of(cls, points: Iterable[FrontierPoint], idle_margin: float | None = None) -> Frontier:
        return cls(tuple(sorted(points, key=lambda p: p.offered_qps)), idle_margin)

    def capacity(self) -> Capacity:
        """The highest rate that keeps the objective, bracketed by the first that does not.

        The lesser of the rate at which the line through the levels near the edge says that the margin is used up, and
        of the sustained rate; without intervals of the margins, where a straight line between the two crosses zero;
        otherwise the passing rate itself.

        A level that failed below that takes it down. One that passed above it does not take it up: a window begins with
        less in flight than its load keeps there, so it flatters, and of several that passed the highest is the
        luckiest. The second highest of the long ones does. Each makes the interval wider.
        """
        points = self._believed()
        failing = [p for p in points if p.verdict == "fail"]
        first_fail = failing[0] if failing else None
        ceiling = first_fail.offered_qps if first_fail else math.inf
        passing = [p for p in points if p.verdict == "pass"]
        below = [p for p in passing if p.offered_qps < ceiling]
        monotone = len(below) == len(passing)
        high = first_fail.offered_qps if first_fail else None
        if not below:
            doubtful = [p for p in points if p.verdict != "fail" and p.offered_qps < ceiling]
            if doubtful or first_fail is None:
                found = self.edge()
                told = (
                    f"; all levels together put it at {found.qps:.3g} ({found.low:.3g} to {found.high:.3g})"
                    if found
                    else ""
                )
                return Capacity(0.0, 0.0, high, "undecided", monotone, f"no rate could be certified{told}")
            why = "no measured rate passes"
            if passing:
                why = f"{high:.3g} queries/s failed; that {passing[0].offered_qps:.3g} queries/s passed is not believed"
            return Capacity(0.0, 0.0, high, "none", monotone, why)
        last = below[-1]
        if first_fail is None:
            return Capacity(last.offered_qps, last.offered_qps, None, "measured", monotone, "no measured rate failed")
        edge = self.edge()
        if edge is not None:
            kept = [p.offered_qps for p in below if not p.is_scout]
            twice = kept[-2] if len(kept) > 1 else 0.0
            qps = min(max(edge.qps, twice), first_fail.offered_qps)
            if edge.limit == "throughput":
                method, why = "sustained", f"no more is completed, by {edge.num_levels} level(s) that were given more"
            else:
                method = "fitted"
                why = f"the margin is used up there, by a line through {edge.num_levels} levels near it"
            odd, happened = (qps, "failed") if qps < edge.qps else (last.offered_qps, "passed")
            if qps < edge.qps or odd > edge.qps:
                why = f"{odd:.3g} queries/s {happened}; all levels together put the edge at {edge.qps:.3g}"
                edge = replace(reaching(edge, odd), qps=qps)
            return Capacity(qps, last.offered_qps, high, method, monotone, why, edge)
        straight = margin_crossing(last, first_fail)
        if straight is None:
            return Capacity(last.offered_qps, last.offered_qps, high, "measured", monotone, "highest rate that passes")
        return Capacity(
            straight, last.offered_qps, high, "interpolated", monotone, "margin crosses zero between the two"
        )

    def _believed(self) -> list[FrontierPoint]:
        """Without the scouts that pass above a longer level that failed, or fail below one that passed; without any
        where longer ones lie close on both sides: the highest of many short levels that passed is the luckiest."""
        long = [p for p in self.points if not p.is_scout]
        top = min((p.offered_qps for p in long if p.verdict == "fail"), default=math.inf)
        bottom = max((p.offered_qps for p in long if p.verdict == "pass"), default=0.0)
        if bottom <= top <= CLOSE * bottom:
            return long
        return [
            p
            for p in self.points
            if not p.is_scout
            or not ((p.verdict == "pass" and p.offered_qps > top) or (p.verdict == "fail" and p.offered_qps < bottom))
        ]

    def sustained(self) -> Sustained | None:
        """What is completed of more than that; None where no level was given more."""
        return sustained_rate([p.balance for p in self.points if p.balance is not None])

    def edge(self) -> Crossing | None:
        """By all levels: where the objectives are used up, or no more is completed.

        Where it is known what is sustained, the interval does not go further below a long level that certainly kept the
        objectives, or below the edge where that is less, than the service may have been slower at other times.
        """
        most = self.sustained()
        found = crossing(
            [
                Level(
                    *(p.arrival_qps or p.offered_qps, p.margin, p.margin_low, p.margin_high),
                    is_scout=p.is_scout,
                    turnovers=p.balance.turnovers if p.balance is not None and most is None else None,
                )
                for p in self.points
                if p.margin is not None
                and p.margin_low is not None
                and p.margin_high is not None
                and not is_saturated(p.balance, most)
            ],
            most,
            idle_margin=self.idle_margin,
        )
        if found is None or most is None:
            return found
        kept = [
            p.offered_qps for p in self.points if p.verdict == "pass" and (p.margin_low or 0) > 0 and not p.is_scout
        ]
        least = min(max(kept, default=0.0), found.qps) * (1 - _DRIFTS * most.drift)
        return replace(found, low=max(found.low, least))


def reaching(edge: Crossing, qps: float) -> Crossing:
    """Of an edge that a level's verdict contradicts: by as much as the two disagree, it may also lie beyond that
    level."""
    beyond = 2 * qps - edge.qps
    return replace(edge, low=min(edge.low, beyond), high=max(edge.high, beyond))


def margin_crossing(low: FrontierPoint, high: FrontierPoint) -> float | None:
    """The rate between the two at which a straight line through their margins is zero; None when the margins do not
    tell (unknown, infinite, or not of opposite sign)."""
    a, b = low.margin, high.margin
    if a is None or b is None or not math.isfinite(a) or not math.isfinite(b) or not a > 0 > b:
        return None
    return low.offered_qps + (high.offered_qps - low.offered_qps) * a / (a - b)

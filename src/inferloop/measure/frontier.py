"""What one replica can carry: points of (rate, verdict, margin) and the capacity at the objective between them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from inferloop.measure.verdict import Verdict


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """An offered rate and how the objectives fared there. `margin` as in measure.verdict, None when unknown."""

    offered_qps: float
    achieved_qps: float | None
    output_tok_s: float | None
    verdict: Verdict
    margin: float | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests per second of one replica at the objective.

    `low` is the highest measured rate that passes below every failing one; `high` the lowest failing rate, None when no
    rate failed (the capacity is at least `low`). `qps` lies between them, found as `method` says: measured |
    interpolated | none | undecided (rates below the failing ones may pass, but not certainly). `monotone` is False when
    a rate above a failing one passed: noise, or a warm cache.
    """

    qps: float
    low: float
    high: float | None
    method: str
    monotone: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Frontier:
    """Points in ascending order of offered rate."""

    points: tuple[FrontierPoint, ...]

    @classmethod
    def of(cls, points: Iterable[FrontierPoint]) -> Frontier:
        return cls(tuple(sorted(points, key=lambda p: p.offered_qps)))

    def capacity(self) -> Capacity:
        """The highest rate that keeps the objective, bracketed by the first that does not.

        Between the two, the rate at which the margin crosses zero on a straight line when both margins are finite and
        of opposite sign; otherwise the passing rate itself.
        """
        failing = [p for p in self.points if p.verdict == "fail"]
        first_fail = failing[0] if failing else None
        ceiling = first_fail.offered_qps if first_fail else math.inf
        passing = [p for p in self.points if p.verdict == "pass"]
        below = [p for p in passing if p.offered_qps < ceiling]
        monotone = len(below) == len(passing)
        high = first_fail.offered_qps if first_fail else None
        if not below:
            doubtful = [p for p in self.points if p.verdict != "fail" and p.offered_qps < ceiling]
            if doubtful or first_fail is None:
                return Capacity(0.0, 0.0, high, "undecided", monotone, "no rate could be certified")
            why = "no measured rate passes"
            if passing:
                why = f"{high:.3g} queries/s failed; that {passing[0].offered_qps:.3g} queries/s passed is not believed"
            return Capacity(0.0, 0.0, high, "none", monotone, why)
        last = below[-1]
        if first_fail is None:
            return Capacity(last.offered_qps, last.offered_qps, None, "measured", monotone, "no measured rate failed")
        crossing = margin_crossing(last, first_fail)
        if crossing is None:
            return Capacity(last.offered_qps, last.offered_qps, high, "measured", monotone, "highest rate that passes")
        return Capacity(
            crossing, last.offered_qps, high, "interpolated", monotone, "margin crosses zero between the two"
        )


def margin_crossing(low: FrontierPoint, high: FrontierPoint) -> float | None:
    """The rate between the two at which a straight line through their margins is zero; None when the margins do not
    tell (unknown, infinite, or not of opposite sign)."""
    a, b = low.margin, high.margin
    if a is None or b is None or not math.isfinite(a) or not math.isfinite(b) or not a > 0 > b:
        return None
    return low.offered_qps + (high.offered_qps - low.offered_qps) * a / (a - b)

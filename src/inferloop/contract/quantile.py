"""A distribution known by a few percentiles, as a function over every quantile.

Choice: log value is linear in the normal score between the given points, so two points make exactly the lognormal
through them (lengths of prompts and answers, and times of tools, are close to lognormal), and more points make a
piecewise lognormal. It passes through every given point and never falls. Normal score: the inverse of the standard
normal distribution (Wichura 1988, AS 241, as in the standard library).

Tails continue the slope of the outer segment. The upper one ends at TAIL_FACTOR times the last given value: the data
say nothing about what lies beyond, and a lognormal alone would make prompts that no model can take. Who knows a longer
tail declares its p99 or p100.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from statistics import NormalDist

from inferloop.contract.workload import Distribution

TAIL_FACTOR = 4.0
_EDGE = 1e-5
"""p0 and p100 stand at this distance from 0 and 1, where the normal score is still finite."""
_NORMAL = NormalDist()


class QuantileFunction:
    """`f(q)` for 0 <= q <= 1: at least 0, never falling, equal to the declared values at the declared quantiles."""

    def __init__(self, distribution: Distribution) -> None:
        points = distribution.points
        if not points:
            raise ValueError("a distribution needs at least one point")
        self._log = all(value > 0 for _, value in points)
        self._scores = [_score(q) for q, _ in points]
        self._heights = [math.log(v) if self._log else v for _, v in points]
        self._slopes = [
            (y2 - y1) / (x2 - x1) if x2 > x1 else 0.0
            for (x1, y1), (x2, y2) in pairwise(zip(self._scores, self._heights, strict=True))
        ] or [0.0]
        (first_q, first), (last_q, last) = points[0], points[-1]
        self._low = first if first_q == 0.0 else 0.0
        self._high = last if last_q == 1.0 else last * TAIL_FACTOR
        self._given = dict(points)
        self._values = [value for _, value in points]

    def __call__(self, quantile: float) -> float:
        if not 0.0 <= quantile <= 1.0:
            raise ValueError(f"a quantile lies between 0 and 1, not {quantile}")
        if quantile in self._given:
            return self._given[quantile]
        score = _score(quantile)
        segment = min(max(bisect_right(self._scores, score) - 1, 0), len(self._slopes) - 1)
        if self._slopes[segment] == 0.0:
            return self._values[segment]
        height = self._heights[segment] + self._slopes[segment] * (score - self._scores[segment])
        value = (math.exp(height) if height < 700 else math.inf) if self._log else height
        return min(max(value, self._low, 0.0), self._high)

    def count(self, quantile: float) -> int:
        """The value as a whole number of at least 1: what a length is."""
        return max(1, math.floor(self(quantile) + 0.5))

    def mean(self, num_points: int = 2000) -> float:
        """The mean of the fitted function (midpoint rule), for sizing; tails as capped above."""
        return math.fsum(self((i + 0.5) / num_points) for i in range(num_points)) / num_points


def _score(quantile: float) -> float:
    return _NORMAL.inv_cdf(min(max(quantile, _EDGE), 1.0 - _EDGE))

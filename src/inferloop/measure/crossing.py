"""The rate at which a service meets the edge of its objectives, with its interval, from load levels around it.

The margin of a level (see `margin`) is turned into limit / latency - 1: for an M/M/1 queue, whose latencies go with
1 / (service rate - arrival rate), that falls on a straight line, and where failures make latency infinite it is -1 and
no infinity. A line is fitted through the levels near the edge by weighted least squares; a level weighs by the interval
of its margin, so a short one counts for little, and by how near it is. The crossing's interval comes from draws of the
line's two coefficients (a ratio of the two has no useful variance of its own). Short levels tell little of the slope;
where the margin of the idle service is known, the line falls at least half as steeply as the way from there to the
edge does on average: queues get worse ever faster, not slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferloop.measure.columns import Floats

CONFIDENCE = 0.95
_Z = 1.96
_MOST = 3.0
"""A latency of a quarter of the limit: beyond that a level says nothing of the edge."""
_LEAST_ERROR = 0.02
_SHORT = 2.0
"""Times its error, what a scout counts for: a short level starts empty and sees few of the long waits."""
_WIDER = 1.75
"""Errors of the line are taken so much larger: margins of few correlated requests scatter more than their bootstrap
says. Set on simulated M/M/1 queues, where 95 % intervals then hold the truth in 57 of 60 runs."""
_NEAR = math.log(1.8)
_ROUNDS = 4
_NUM_DRAWS = 4000
_STEEPNESS = 0.5
_BEYOND = 1.5
"""How far outside the measured rates an end of the interval may lie, as a factor."""


@dataclass(frozen=True, slots=True)
class Level:
    """A rate that was offered, and the margin there with its 95 % interval: up to 1, down to -inf."""

    qps: float
    margin: float
    low: float
    high: float
    is_scout: bool = False


@dataclass(frozen=True, slots=True)
class Crossing:
    """`low` to `high` holds the true rate with `confidence`."""

    qps: float
    low: float
    high: float
    confidence: float
    num_levels: int

    @property
    def half_width(self) -> float:
        """Of the interval, as a share of the rate."""
        return (self.high - self.low) / 2 / self.qps


def crossing(
    levels: Sequence[Level], *, idle_margin: float | None = None, confidence: float = CONFIDENCE, seed: int = 0
) -> Crossing | None:
    """None unless a level lies on each side of the edge, by what was observed there."""
    fall = _STEEPNESS * max(0.0, _headroom(idle_margin)) if idle_margin is not None else 0.0
    told = sorted((v for v in levels if v.qps > 0 and not math.isnan(v.margin)), key=lambda v: v.qps)
    x = np.array([v.qps for v in told], np.float64)
    y, below, above = (np.array([_headroom(v) for v in row]) for row in _columns(told))
    if not len(told) or not (y > 0).any() or not (y <= 0).any():
        return None
    error = np.maximum(_LEAST_ERROR, (above - below) / 2 / _Z)
    error *= np.where([v.is_scout for v in told], _SHORT, 1.0)
    center = _first_guess(x, y)
    for _ in range(_ROUNDS):
        weights = _nearness(x, y, center) / error**2
        mean, level, slope, covariance = _line(x, y, weights)
        slope = min(slope, -fall / center)
        found = mean - level / slope if slope < 0 else center
        center = float(np.clip(found, x[0], x[-1]))
    rng = np.random.default_rng((seed, len(told)))
    draws = rng.multivariate_normal((level, slope), covariance, _NUM_DRAWS, method="cholesky")
    slopes = np.minimum(draws[:, 1], -fall / center)
    ends = np.where(draws[:, 0] > 0, math.inf, -math.inf)
    crossings = np.where(slopes < 0, mean - draws[:, 0] / np.minimum(slopes, -1e-300), ends)
    crossings = np.clip(crossings, x[0] / _BEYOND, x[-1] * _BEYOND)
    tail = (1 - confidence) / 2
    low, high = np.quantile(crossings, (tail, 1 - tail))
    return Crossing(center, min(float(low), center), max(float(high), center), confidence, int((weights > 0).sum()))


def _columns(levels: Sequence[Level]) -> tuple[list[float], list[float], list[float]]:
    return [v.margin for v in levels], [v.low for v in levels], [v.high for v in levels]


def _headroom(margin: float) -> float:
    """limit / latency - 1."""
    return _MOST if margin >= _MOST / (1 + _MOST) else 1 / (1 - margin) - 1


def _first_guess(x: Floats, y: Floats) -> float:
    """The middle of the cut that leaves the fewest levels on the wrong side."""
    wrong = [int((y[:k] <= 0).sum() + (y[k:] > 0).sum()) for k in range(1, len(x))]
    cut = int(np.argmin(wrong)) + 1
    return math.sqrt(x[cut - 1] * x[cut])


def _nearness(x: Floats, y: Floats, center: float) -> Floats:
    """From 1 at the center to 0 at a distance that holds a level of each side at least."""
    distance = np.abs(np.log(x / center))
    reach = max(_NEAR, 1.3 * float(distance[y > 0].min()), 1.3 * float(distance[y <= 0].min()))
    return np.maximum(0.0, 1 - (distance / reach) ** 2)


def _line(x: Floats, y: Floats, weights: Floats) -> tuple[float, float, float, Floats]:
    """(weighted mean of x, value there, slope, covariance of the two). Levels that lie further from a line than their
    errors allow make all errors so much larger."""
    total = weights.sum()
    mean = float(weights @ x / total)
    centred = x - mean
    spread = float(weights @ centred**2)
    level = float(weights @ y / total)
    slope = float(weights @ (centred * y) / spread) if spread > 0 else 0.0
    dof = int((weights > 0).sum()) - 2
    inflation = _WIDER**2
    if dof > 0:
        misfit = float(weights @ (y - level - slope * centred) ** 2) / dof
        inflation *= max(1.0, misfit)
    covariance = np.diag([inflation / total, inflation / spread if spread > 0 else 1e12])
    return mean, level, slope, covariance

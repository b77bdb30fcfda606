"""The edge of what a service carries: the lesser of the rate at which its objectives are used up and of the rate that
it sustains, with the interval of both together.

The margin of a level (see `margin`) is turned into limit / latency - 1: for an M/M/1 queue, whose latencies go with
1 / (service rate - arrival rate), that falls on a straight line, and where latency is infinite it is -1 and no
infinity. So a saturated service is a point of that line: -1, at the rate it completes. The latencies of saturated
levels take no part, because they tell how long the level was measured. A line is fitted through the levels near the
edge by weighted least squares; a level weighs by the interval of its margin, by how much the service's speed drifts
between levels, and by how near it is. The interval comes from lines through points that are moved by their errors (a
ratio of two coefficients has no useful variance of its own), the sustained rate among them. Short levels tell little of
the slope, so the line falls at least half as steeply as the way from the idle service to the edge does, and as that
from the edge to saturation: queues get worse ever faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from inferloop.measure.columns import Floats
from inferloop.measure.sustained import DRIFT, Sustained

CONFIDENCE = 0.95
_Z = 1.96
_MOST = 3.0
"""A latency of a quarter of the limit: beyond that a level says nothing of the edge."""
_LEAST_ERROR = 0.02
_WIDER, _SHORT = 2.25, 2.0
"""Errors of margins are taken so much larger, those of scouts once more: those of few correlated requests scatter more
than their bootstrap says. Set on simulated queues."""
_LEAST_WIDER, _MOST_WIDER, _CORRELATED = 1.15, 1.9, 330.0
"""The same by the turnovers of a level, where they are known."""
_STARTING, _MOST_STARTING = 6.0, 0.5
"""A window begins with less in flight than the load keeps there, and the mean of a reciprocal is above the reciprocal
of the mean: limit / latency is too large by such a number of turnovers over those of the window, at most by half."""
_NEAR = math.log(1.8)
_ROUNDS = 8
_NUM_DRAWS = 4000
_STEEPNESS = 0.5
_SHAPE = 0.35
"""Standard error, in parts of the gap between the neighbours of the edge, of taking the way between for straight."""
_UNKNOWN = 0.03
"""Standard error, as a share, of what neither the line nor the drift tells. Set on simulated servers that batch."""
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
    turnovers: float | None = None
    """Of its window, see Balance: how long it was for a queue in front of one server. None where they are not known, or
    where it is known what the service sustains: then it has many places, whose queue is quicker to settle than a
    turnover, and the point at which it is full holds the line."""

    @property
    def headroom(self) -> float:
        """limit / latency - 1, in equilibrium."""
        seen = _headroom(self.margin)
        if self.turnovers is None or seen >= _MOST:
            return seen
        return (1 + seen) * (1 - min(_MOST_STARTING, _STARTING / self.turnovers)) - 1


@dataclass(frozen=True, slots=True)
class Crossing:
    """`low` to `high` holds the true rate with `confidence`. `limit`: what ends there first in most draws."""

    qps: float
    low: float
    high: float
    confidence: float
    num_levels: int
    limit: Literal["latency", "throughput"] = "latency"
    slope: float = 0.0
    """Of limit / latency - 1 there, per request a second; 0 where it is not known."""

    @property
    def half_width(self) -> float:
        """Of the interval, as a share of the rate."""
        return (self.high - self.low) / 2 / self.qps


def crossing(
    levels: Sequence[Level],
    sustained: Sustained | None = None,
    *,
    idle_margin: float | None = None,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Crossing | None:
    """`levels` are those that are not saturated. None unless one is on the good side of the edge, and one on the other
    or the sustained rate is known."""
    told = sorted((v for v in levels if v.qps > 0 and not math.isnan(v.margin)), key=lambda v: v.qps)
    kept = [v for v in told if v.headroom > 0]
    if not kept or (sustained is None and len(kept) == len(told)):
        return None
    told = [v for v in told if v.headroom < _MOST or v is kept[-1]]
    rng = np.random.default_rng((seed, len(told)))
    drift = sustained.drift if sustained else DRIFT
    points = [(v.qps, v.headroom, _error(v), drift * v.qps) for v in told]
    if sustained is not None:
        points.append((sustained.qps, -1.0, _LEAST_ERROR, sustained.error))
    idle = max(0.0, _headroom(idle_margin)) if idle_margin is not None else 0.0
    fall = _Fall(idle, sustained.qps if sustained else math.inf)
    x, y, error, x_error = np.array(points, np.float64).T
    center, slope, weights = _fitted(x, y, error, x_error, fall)
    wider = math.sqrt(_misfit(x, y, weights))
    moved = x + wider * x_error * rng.standard_normal((_NUM_DRAWS, len(x)))
    if sustained is not None:
        moved[:, -1] = sustained.draws(rng, _NUM_DRAWS)
    y_moved = y + wider * error * rng.standard_normal(moved.shape)
    draws = _crossings(moved, y_moved, weights, fall.at(center), is_full=sustained is not None)
    gap = float(x[x >= center].min(initial=math.inf) - x[x <= center].max(initial=-math.inf))
    if math.isfinite(gap):
        draws = draws + _SHAPE * gap * rng.standard_normal(_NUM_DRAWS)
    draws = np.clip(draws, x.min() / _BEYOND, x.max() * _BEYOND)
    num = len(told)
    limit: Literal["latency", "throughput"] = "latency"
    if sustained is not None:
        if (moved[:, -1] < draws).mean() > 0.5:
            limit, num = "throughput", sustained.num_levels
        center, draws = min(center, sustained.qps), np.minimum(draws, moved[:, -1])
    draws = draws * np.exp(_UNKNOWN * rng.standard_normal(_NUM_DRAWS))
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, (tail, 1 - tail))
    return Crossing(center, min(float(low), center), max(float(high), center), confidence, num, limit, slope)


@dataclass(frozen=True, slots=True)
class _Fall:
    """How steep the line is at least: half as steep as the way from the idle service to the edge, and as that from the
    edge to saturation."""

    idle: float
    most_qps: float

    def at(self, center: float) -> float:
        beyond = self.most_qps - center
        return _STEEPNESS * max(self.idle / center, 1 / beyond if beyond > 0.01 * center else 0.0)


def _fitted(x: Floats, y: Floats, error: Floats, x_error: Floats, fall: _Fall) -> tuple[float, float, Floats]:
    """(where the line crosses zero, its slope, the weights of the points)."""
    center, slope = _first_guess(x, y), 0.0
    for _ in range(_ROUNDS):
        weights = _nearness(x, y, center) / (error**2 + (slope * x_error) ** 2)
        slope = min(float(_slopes(x, y, weights)), -fall.at(center))
        mean, level = float(weights @ x / weights.sum()), float(weights @ y / weights.sum())
        center = float(np.clip(mean - level / slope if slope < 0 else center, x.min(), x.max()))
    return center, slope, weights


def _slopes(x: Floats, y: Floats, weights: Floats) -> Floats:
    """Of lines through points (last axis) by weighted least squares; 0 where all have one x."""
    total = weights.sum()
    from_mean = x - (x @ weights / total)[..., None]
    spread = from_mean**2 @ weights
    found: Floats = np.divide((from_mean * y) @ weights, spread, out=np.zeros_like(spread), where=spread > 0)
    return found


def _crossings(x: Floats, y: Floats, weights: Floats, fall: float, *, is_full: bool) -> Floats:
    """Where the lines through the rows' points cross zero; infinite where one never does. `is_full`: the last point is
    that of saturation; levels from which nothing falls towards it kept their objectives beyond it, so latency ends
    nothing before."""
    told = _slopes(x, y, weights)
    slopes = np.where(told < 0, np.minimum(told, -fall), 0.0 if is_full else -fall)
    mean, level = x @ weights / weights.sum(), y @ weights / weights.sum()
    ends = np.where((level > 0) | is_full, math.inf, -math.inf)
    out: Floats = np.where(slopes < 0, mean - level / np.minimum(slopes, -1e-300), ends)
    return out


def _misfit(x: Floats, y: Floats, weights: Floats) -> float:
    """How much larger the squared distances of the points from their line are than their errors allow, at least 1."""
    dof = int((weights > 0).sum()) - 2
    if dof <= 0:
        return 1.0
    slope, total = float(_slopes(x, y, weights)), weights.sum()
    rest = y - y @ weights / total - slope * (x - x @ weights / total)
    return max(1.0, float(weights @ rest**2) / dof)


def _error(level: Level) -> float:
    spread = (_headroom(level.high) - _headroom(level.low)) / 2 / _Z
    if level.turnovers is None:
        wider = _WIDER * (_SHORT if level.is_scout else 1.0)
    else:
        wider = min(_MOST_WIDER, _LEAST_WIDER * math.sqrt(1 + _CORRELATED / level.turnovers))
    return wider * max(_LEAST_ERROR, spread)


def _headroom(margin: float) -> float:
    """limit / latency - 1."""
    return _MOST if margin >= _MOST / (1 + _MOST) else 1 / (1 - margin) - 1


def _first_guess(x: Floats, y: Floats) -> float:
    """The middle of the cut that leaves the fewest levels on the wrong side."""
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    wrong = [int((y[:k] <= 0).sum() + (y[k:] > 0).sum()) for k in range(1, len(x))]
    cut = int(np.argmin(wrong)) + 1
    return math.sqrt(x[cut - 1] * x[cut])


def _nearness(x: Floats, y: Floats, center: float) -> Floats:
    """From 1 at the center to 0 at a distance that holds a level of each side at least."""
    distance = np.abs(np.log(x / center))
    reach = max(_NEAR, 1.3 * float(distance[y > 0].min()), 1.3 * float(distance[y <= 0].min()))
    return np.maximum(0.0, 1 - (distance / reach) ** 2)

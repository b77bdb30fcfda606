"""The rate that a service sustains: what it completes while it is given more than that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferloop.measure.balance import Balance
from inferloop.measure.columns import Floats

_OVER = 1.05
"""A level that was given so much more than what saturated ones complete is one of them, though its own window was too
short to tell: to take only those whose completions were few enough to tell would make the estimate too low."""
DRIFT, _PRIOR_LEVELS = 0.04, 2
"""How much the speed of a service differs between levels, before anything was seen of that, and for how many levels
this guess counts: one or two levels that agree do not show that it does not."""


@dataclass(frozen=True, slots=True)
class Sustained:
    """Completions per second, with the standard error and its degrees of freedom."""

    qps: float
    error: float
    dof: int
    num_levels: int
    drift: float
    """Standard deviation of the service's speed between levels, as a share."""

    def draws(self, rng: np.random.Generator, num: int) -> Floats:
        return np.maximum(self.qps + self.error * rng.standard_t(self.dof, num), 1e-9)


def is_saturated(balance: Balance | None, sustained: Sustained | None) -> bool:
    """Whether the level's latencies are those of a growing queue, which tell how long it was measured."""
    if balance is None or balance.verdict == "sustained":
        return False
    return balance.verdict == "saturated" or (sustained is not None and balance.arrived_qps > _OVER * sustained.qps)


def sustained_rate(balances: Sequence[Balance]) -> Sustained | None:
    """None unless a level is saturated."""
    certain = pooled([b for b in balances if is_saturated(b, None)])
    return pooled([b for b in balances if is_saturated(b, certain)])


def pooled(levels: Sequence[Balance]) -> Sustained | None:
    """Random effects (DerSimonian and Laird 1986): levels differ by their own errors and because the speed of a machine
    that is shared with others drifts from one to the next."""
    if not levels:
        return None
    rates = np.array([b.completed_qps for b in levels])
    variances = np.maximum(np.array([b.completed_error for b in levels]) ** 2, (1e-3 * rates) ** 2)
    weights = 1 / variances
    k = len(levels)
    mean = float(weights @ rates / weights.sum())
    excess = float(weights @ (rates - mean) ** 2) - (k - 1)
    between = max(0.0, excess / float(weights.sum() - (weights @ weights) / weights.sum())) if k > 1 else 0.0
    between = ((k - 1) * between + _PRIOR_LEVELS * (DRIFT * mean) ** 2) / (k - 1 + _PRIOR_LEVELS)
    weights = 1 / (variances + between)
    mean = float(weights @ rates / weights.sum())
    return Sustained(mean, math.sqrt(1 / float(weights.sum())), k - 1 + _PRIOR_LEVELS, k, math.sqrt(between) / mean)

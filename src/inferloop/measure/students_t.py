"""Student's t distribution for whole degrees of freedom, and the normal one that it tends to."""

from __future__ import annotations

import math
from statistics import NormalDist

_NORMAL = NormalDist()


def t_cdf(t: float, dof: int) -> float:
    """P(T <= t): the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    if dof < 1:
        raise ValueError(f"need at least one degree of freedom, got {dof}")
    theta = math.atan(abs(t) / math.sqrt(dof))
    sine, cosine = math.sin(theta), math.cos(theta)
    term, total = (cosine, cosine) if dof % 2 else (1.0, 1.0)
    for k in range(3 if dof % 2 else 2, dof, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if dof == 1:
        total = 0.0
    inside = 2 / math.pi * (theta + sine * total) if dof % 2 else sine * total
    return 0.5 + math.copysign(inside / 2, t)


def t_quantile(p: float, dof: int) -> float:
    """The t with P(T <= t) = p, to 1e-12."""
    if not 0.0 < p < 1.0:
        raise ValueError(f"need 0 < p < 1, got {p}")
    if p < 0.5:
        return -t_quantile(1.0 - p, dof)
    low, high = 0.0, 1.0
    while t_cdf(high, dof) < p:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, dof) < p else (low, middle)
    return high


def normal_cdf(z: float) -> float:
    return _NORMAL.cdf(z)

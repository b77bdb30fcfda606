"""How long a step takes, learnt from the steps that were, and what fits into a given time."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_PREFILL_TOKENS = 16
"""However tight a limit is, a step that may prefill takes this many tokens, so that every prompt gets on."""

_SCALE = (1.0, 8.0, 64.0)
"""A usual step in units of the three features, so that one ridge weighs them alike."""
_KEEP = 0.98
"""What a step's weight shrinks to with each later one: about fifty steps are remembered."""
_RIDGE = 0.05
"""Pull towards the estimate before. What recent steps do not tell apart stays as it was, instead of drifting."""
_HUBER = 3.0
"""A residual beyond this many usual ones counts as that many: a stall is no new speed, unless it stays."""
_LEAST_NOISE = 0.05
"""Residuals are never taken to be smaller than this share of the step."""
_LEAST_PIVOT = 1e-14


_MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step takes fixed_ms + per_decode_ms * rows that decode + per_prefill_ms * tokens beyond those.

    The defaults, until something is measured, are those of a modest CPU: steps that begin short do less harm.
    """

    fixed_ms: float = 20.0
    per_decode_ms: float = 0.5
    per_prefill_ms: float = 1.0

    def predict(self, num_prefill: int, num_decodes: int) -> float:
        """Milliseconds of a step."""
        return self.fixed_ms + self.per_decode_ms * num_decodes + self.per_prefill_ms * num_prefill

    def num_prefill_within(self, ms: float, num_decodes: int) -> int:
        """How many tokens beside the decoding rows fit; 0 when those alone take longer."""
        return _num_within(ms - self.predict(0, num_decodes), self.per_prefill_ms)

    def num_decodes_within(self, ms: float) -> int:
        return _num_within(ms - self.fixed_ms, self.per_decode_ms)


def _num_within(ms: float, each_ms: float) -> int:
    if ms <= 0:
        return 0
    return _MANY if each_ms * _MANY <= ms else math.floor(ms / each_ms)


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The longest that a step should take."""

    ms: float
    time: StepTime


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Time limits of the next step beside its token budget; None: none.

    `foreground` bounds what is prefilled beside foreground sequences that decode, which are never held back themselves;
    MIN_PREFILL_TOKENS are prefilled whatever it says. `background` bounds all of a step of background work alone, which
    has one row, or without any MIN_PREFILL_TOKENS, whatever it says.
    """

    foreground: TimeLimit | None = None
    background: TimeLimit | None = None

    def num_decodes(self, in_background: bool) -> int:
        """How many rows may decode."""
        limit = self.background if in_background else None
        return _MANY if limit is None else max(1, limit.time.num_decodes_within(limit.ms))

    def num_prefill(self, in_background: bool, num_decodes: int) -> int:
        """How many tokens may be computed beside `num_decodes` rows that decode."""
        limit = self.background if in_background else self.foreground if num_decodes else None
        if limit is None:
            return _MANY
        least = 0 if in_background and num_decodes else MIN_PREFILL_TOKENS
        return max(least, limit.time.num_prefill_within(limit.ms, num_decodes))


_Three = tuple[float, float, float]
_Six = tuple[float, float, float, float, float, float]
"""The upper triangle of a symmetric matrix, row by row."""


class StepTimeFit:
    """Weighted least squares over the steps so far, the recent ones most.

    Relative errors count, because a long step varies by more. The estimate minimises

        sum_i keep^(n-i) * w_i * (ms_i - x_i . theta)^2 / predicted_i^2  +  ridge * |theta - theta_before|^2

    with Huber's weights w_i, and no coefficient is negative. In plain floats, because every step pays for it: for three
    numbers numpy takes fifteen times as long.
    """

    def __init__(self, prior: StepTime | None = None) -> None:
        start = prior or StepTime()
        fixed, decode, prefill = _SCALE
        self._theta: _Three = (start.fixed_ms * fixed, start.per_decode_ms * decode, start.per_prefill_ms * prefill)
        self._gram: _Six = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._moment: _Three = (0.0, 0.0, 0.0)
        self._noise = 1.0

    @property
    def noise(self) -> float:
        """By what share of the estimate a step usually misses it; 1 before there was any."""
        return min(self._noise, 1.0)

    @property
    def time(self) -> StepTime:
        (fixed, decode, prefill), (per_step, per_decode, per_prefill) = self._theta, _SCALE
        return StepTime(fixed / per_step, decode / per_decode, prefill / per_prefill)

    def observe(self, num_prefill: int, num_decodes: int, ms: float) -> None:
        """Take in one step that took `ms` > 0."""
        fixed, decode, prefill = self._theta
        x, y, z = 1 / _SCALE[0], num_decodes / _SCALE[1], num_prefill / _SCALE[2]
        predicted = max(x * fixed + y * decode + z * prefill, 1e-3)
        miss = abs(ms - predicted) / predicted
        weight = min(1.0, _HUBER * self._noise / miss) if miss else 1.0
        self._noise = max(_LEAST_NOISE, 0.9 * self._noise + 0.1 * min(miss, _HUBER * self._noise))
        x, y, z, target = x / predicted, y / predicted, z / predicted, ms / predicted
        xx, xy, xz, yy, yz, zz = self._gram
        p, q, r = self._moment
        xx, yy, zz = _KEEP * xx + weight * x * x, _KEEP * yy + weight * y * y, _KEEP * zz + weight * z * z
        xy, xz, yz = _KEEP * xy + weight * x * y, _KEEP * xz + weight * x * z, _KEEP * yz + weight * y * z
        wanted = weight * target
        p, q, r = _KEEP * p + wanted * x, _KEEP * q + wanted * y, _KEEP * r + wanted * z
        self._gram, self._moment = (xx, xy, xz, yy, yz, zz), (p, q, r)
        # relative to the size of the step, so that the ridge means the same on fast and slow machines
        ridge = _RIDGE / predicted**2
        gram = (xx + ridge, xy, xz, yy + ridge, yz, zz + ridge)
        fixed, decode, prefill = _solve(gram, (p + ridge * fixed, q + ridge * decode, r + ridge * prefill))
        self._theta = (max(fixed, 0.0), max(decode, 0.0), max(prefill, 0.0))


def _solve(matrix: _Six, right: _Three) -> _Three:
    """The solution of three equations with a positive definite matrix, by elimination; rounding must not make a pivot
    negative."""
    a, b, c, d, e, f = matrix
    p, q, r = right
    d, e, q = max(d - b * b / a, d * _LEAST_PIVOT), e - b * c / a, q - b * p / a
    f, r = max(f - c * c / a - e * e / d, f * _LEAST_PIVOT), r - c * p / a - e * q / d
    z = r / f
    y = (q - e * z) / d
    return (p - b * y - c * z) / a, y, z

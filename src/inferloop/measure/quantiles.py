"""Exact quantiles, and how many samples a quantile needs before it may be published.

Definition: the q-quantile of n samples is the smallest sample x with at least q*n samples <= x (the inverse of the
empirical distribution; Hyndman and Fan 1996, type 1). It is always a value that was really observed, so failures can
take part as +inf. A percentile is published only when enough samples stand behind it: one sample may exceed the bound
and still the true quantile lies below it with 99 % confidence (binomial early stopping as in MLPerf LoadGen). That asks
for 64, 130, 662 and 6636 samples for p90, p95, p99 and p99.9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from inferloop.measure.columns import Floats

CONFIDENCE = 0.99
_ALLOWED_OVER = 1  # as in LoadGen: a floor that one outlier does not move


@dataclass(frozen=True, slots=True)
class Percentile:
    """One quantile of one sample. `value` is None when it is not certifiable; then `num_more_needed` > 0.

    `value` may be +inf: more than 1 - quantile of the requests failed.
    """

    quantile: float
    num_samples: int
    value: float | None
    num_more_needed: int

    @property
    def text(self) -> str:
        if self.value is None:
            return f"not certifiable, {self.num_more_needed} more needed"
        return "infinite" if math.isinf(self.value) else f"{self.value:.4g}"


def quantile(ordered: Sequence[float] | Floats, q: float) -> float:
    """The q-quantile of samples sorted ascending, 0 < q <= 1. Raises ValueError for an empty sample or a bad q."""
    if not len(ordered) or not 0.0 < q <= 1.0:
        raise ValueError(f"need samples and 0 < q <= 1, got {len(ordered)} samples and q={q}")
    rank = math.ceil(q * len(ordered) - 1e-9)  # 0.95 * 140 is 133 plus a rounding error
    return float(ordered[max(rank, 1) - 1])


def percentile(ordered: Sequence[float] | Floats, q: float, *, num_independent: int | None = None) -> Percentile:
    """The q-quantile of sorted samples when it is certifiable.

    `num_independent` is the number of independent observations behind the samples (requests behind token gaps, which
    are correlated within a request); it defaults to the number of samples.
    """
    n = len(ordered) if num_independent is None else min(num_independent, len(ordered))
    missing = max(0, min_samples(q) - n)
    return Percentile(q, n, None if missing else quantile(ordered, q), missing)


@lru_cache(maxsize=256)
def min_samples(q: float, confidence: float = CONFIDENCE) -> int:
    """The smallest n with P(Binomial(n, 1-q) <= 1) <= 1 - confidence."""
    if not 0.0 < q < 1.0 or not 0.0 < confidence < 1.0:
        raise ValueError(f"need 0 < q < 1 and 0 < confidence < 1, got q={q}, confidence={confidence}")
    low, high = 1, 2
    while binomial_cdf(_ALLOWED_OVER, high, 1.0 - q) > 1.0 - confidence:
        low, high = high, high * 2
    while low < high:
        middle = (low + high) // 2
        if binomial_cdf(_ALLOWED_OVER, middle, 1.0 - q) <= 1.0 - confidence:
            high = middle
        else:
            low = middle + 1
    return high


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(Binomial(n, p) <= k), or 1 less the other tail where that is the shorter one: its terms fall from the first on,
    so that some sqrt(n) of them are all that counts. The first is taken from its logarithm, as large n underflow."""
    if k < 0:
        return 0.0
    if k >= n or p <= 0.0:
        return 1.0
    if p >= 1.0:
        return 0.0
    is_lower = k < (n + 1) * p
    i = k if is_lower else k + 1
    log_choices = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
    term = math.exp(log_choices + i * math.log(p) + (n - i) * math.log1p(-p))
    odds, total = p / (1.0 - p), 0.0
    while term > total * 1e-17:
        total += term
        if is_lower:
            term *= i / ((n - i + 1) * odds)
            i -= 1
        else:
            term *= (n - i) * odds / (i + 1)
            i += 1
    return min(1.0, total if is_lower else 1.0 - total)

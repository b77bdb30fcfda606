"""How far inside its objectives a service is, with the interval that a search for its capacity may bisect on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from inferloop.core.slo import Slo
from inferloop.measure.bootstrap import NUM_RESAMPLES, BlockBootstrap
from inferloop.measure.columns import NOT_OURS, Columns, Floats
from inferloop.measure.quantiles import binomial_cdf, quantile
from inferloop.measure.samples import Samples, collect
from inferloop.measure.timing import RequestTiming
from inferloop.measure.verdict import effective_limit, in_scope


@dataclass(frozen=True, slots=True)
class MarginInterval:
    """The joint margin: over all latency objectives the least of (limit - quantile) / limit. Positive: all are kept.

    The service keeps its objectives, with the confidence, where `low` > 0, and misses one where `high` < 0. `low` is
    -inf where too few requests were measured (or too many failed) to bound it, `high` is +1 at most.
    """

    margin: float
    low: float
    high: float
    confidence: float
    num_blocks: int
    """0: too few requests for blocks; then the ends take them for independent."""
    worst: str
    """The label of the objective with the least margin."""

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: an infinite number is null."""
        numbers = {"margin": self.margin, "low": self.low, "high": self.high}
        return {
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "confidence": self.confidence,
            "num_blocks": self.num_blocks,
            "worst": self.worst,
        }


def margin_interval(
    slo: Slo,
    requests: Iterable[RequestTiming],
    confidence: float = 0.95,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> MarginInterval | None:
    """The joint margin of these requests. None without a latency objective or without a sample for one of them.

    Two intervals are made, and their hull is taken. The block bootstrap resamples all objectives together and takes the
    least margin of each replicate, so how they hang together is kept and nothing is lost to a correction for many
    comparisons. Where samples are few it cannot see beyond the largest of them; there the exact interval by order
    statistics, shared out among the objectives (Bonferroni), says how little is known. What the cut-off hid is taken
    as infinite for the low end and as the time it had for the high end. Error rates take no part: their budget spans
    weeks.
    """
    c = Columns.of(in_scope(slo, requests))
    limits = [effective_limit(o, slo.network_ms) for o in slo.objectives]
    found = [collect(o.metric, c, from_intended=True) for o in slo.objectives]
    if not found or not all(samples.num_total for samples in found):
        return None
    quantiles = [o.quantile for o in slo.objectives]
    margins = [_margin(quantile(s.adjusted(), q), x) for s, q, x in zip(found, quantiles, limits, strict=True)]
    risk = (1.0 - confidence) / 2.0 / len(found)
    exact = [_order_bounds(s, q, risk) for s, q in zip(found, quantiles, strict=True)]
    low = min(_margin(above, x) for (_, above), x in zip(exact, limits, strict=True))
    high = min(_margin(below, x) for (below, _), x in zip(exact, limits, strict=True))
    bootstrap = _bootstrap(c, num_resamples, seed)
    if bootstrap is not None:
        pessimistic = [
            _margins(bootstrap.quantile(*s.pessimistic(), q), x)
            for s, q, x in zip(found, quantiles, limits, strict=True)
        ]
        optimistic = [
            _margins(bootstrap.quantile(*s.optimistic(), q), x) if len(s.hidden) else same
            for s, q, x, same in zip(found, quantiles, limits, pessimistic, strict=True)
        ]
        low = min(low, bootstrap.interval(np.min(pessimistic, axis=0), confidence).low)
        high = max(high, bootstrap.interval(np.min(optimistic, axis=0), confidence).high)
    worst = slo.objectives[int(np.argmin(margins))].label
    return MarginInterval(min(margins), low, high, confidence, bootstrap.num_blocks if bootstrap else 0, worst)


def _bootstrap(c: Columns, num_resamples: int, seed: int) -> BlockBootstrap | None:
    if np.count_nonzero(c.status != NOT_OURS) == 0:
        return None
    return BlockBootstrap.of(c.start(from_intended=True), num_resamples=num_resamples, seed=seed)


def _margin(value: float, limit: float) -> float:
    return (limit - value) / limit if limit > 0 else -math.inf


def _margins(values: Floats, limit: float) -> Floats:
    return (limit - values) / limit if limit > 0 else np.full(len(values), -np.inf)


def _order_bounds(samples: Samples, q: float, risk: float) -> tuple[float, float]:
    """(lower, upper) bound of the true quantile, each wrong with probability `risk` at most: the sample values of those
    ranks between which it lies, by the binomial distribution of how many samples lie below it. Values of one request
    count as one observation."""
    n = samples.num_requests
    below, above = np.sort(samples.optimistic()[0]), np.sort(samples.pessimistic()[0])
    # P(at most k - 1 of n lie below the quantile) is the chance that sample k is already over it.
    first = _last_rank(n, q, risk)
    last = _first_rank(n, q, risk)
    low = 0.0 if first < 1 else quantile(below, first / n)
    return low, math.inf if last > n else quantile(above, last / n)


def _last_rank(n: int, q: float, risk: float) -> int:
    """The largest k with P(Binomial(n, q) <= k - 1) <= risk; 0 when there is none."""
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if binomial_cdf(middle - 1, n, q) <= risk else (low, middle - 1)
    return low


def _first_rank(n: int, q: float, risk: float) -> int:
    """The smallest k with P(Binomial(n, q) >= k) <= risk; n + 1 when there is none."""
    low, high = 1, n + 1
    while low < high:
        middle = (low + high) // 2
        over = 1.0 - binomial_cdf(middle - 1, n, q) if middle <= n else 0.0
        low, high = (low, middle) if over <= risk else (middle + 1, high)
    return low

"""Confidence intervals of what is measured on a queue: block bootstrap.

Requests that wait in one queue are slow together, so they are not independent observations, and an interval that takes
them for such is too narrow. Blocks of neighbours in time are therefore resampled whole (Künsch 1989, "The jackknife and
the bootstrap for general stationary observations"), from a series closed to a circle, so that its ends weigh as much
as its middle (Politis and Romano 1992, "A circular block-resampling procedure for stationary data").

Few long blocks hold the correlation, but make a percentile interval too narrow: the tails taken are those that
Student's t with (blocks - 1) degrees of freedom asks for (the expanded percentile interval of Hesterberg 2015, "What
teachers should know about the bootstrap").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from inferloop.measure.columns import Floats, Ints
from inferloop.measure.students_t import normal_cdf, t_quantile

NUM_BLOCKS = 12
MIN_BLOCKS = 10
"""Fewer blocks tell too little of how much they differ."""
NUM_RESAMPLES = 1000
_MAX_CELLS = 256
"""A series is cut into at most so many cells of neighbours; blocks are whole cells. Keeps a million requests cheap."""
_MAX_BINS = 1024
"""A replicate's quantile is exact up to as many different values, else to the nearest of so many of the sample."""


@dataclass(frozen=True, slots=True)
class Interval:
    """`low` and `high` may be infinite: so many failed, or so few were measured, that no number bounds it."""

    low: float
    high: float
    confidence: float
    num_blocks: int

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: an infinite end is null and named in `infinite`."""
        ends = {"low": self.low, "high": self.high}
        return {
            **{name: value if math.isfinite(value) else None for name, value in ends.items()},
            "infinite": [name for name, value in ends.items() if math.isinf(value)],
            "confidence": self.confidence,
            "num_blocks": self.num_blocks,
        }


@dataclass(frozen=True, slots=True, eq=False)
class BlockBootstrap:
    """Replicates of one series of observations. Statistics taken from the same object are resampled together, so that
    they may be combined replicate by replicate. Seeded: equal series give equal intervals."""

    cell_of: Ints
    """The cell that each observation lies in."""
    counts: Floats
    """(replicate, cell): how often a replicate holds the cell."""
    num_blocks: int

    @classmethod
    def of(
        cls,
        times: Sequence[int] | Ints,
        *,
        num_blocks: int = NUM_BLOCKS,
        num_resamples: int = NUM_RESAMPLES,
        seed: int = 0,
    ) -> BlockBootstrap | None:
        """For observations made at `times`, in any order. None for fewer than 2 * MIN_BLOCKS of them."""
        if num_blocks < MIN_BLOCKS:
            raise ValueError(f"need at least {MIN_BLOCKS} blocks, got {num_blocks}")
        n = len(times)
        if n < 2 * MIN_BLOCKS:
            return None
        num_cells = min(n, _MAX_CELLS)
        num_blocks = min(num_blocks, n // 2)
        rank = np.empty(n, np.int64)
        rank[np.argsort(np.asarray(times), kind="stable")] = np.arange(n)
        counts = _draw(num_cells, num_blocks, num_resamples, seed)
        return cls(rank * num_cells // n, counts, num_blocks)

    def quantile(self, values: Floats, owners: Ints, q: float) -> Floats:
        """As `quantiles`, of one."""
        return self.quantiles(values, owners, (q,))[q]

    def quantiles(self, values: Floats, owners: Ints, qs: Sequence[float]) -> dict[float, Floats]:
        """The quantiles `qs` of each replicate. `owners` says which observation each value belongs to; an observation
        may have none or many. NaN where a replicate has no value."""
        if not len(values):
            return {q: np.full(len(self.counts), np.nan) for q in qs}
        ordered = np.sort(values)
        if len(ordered) > _MAX_BINS:
            ordered = ordered[np.linspace(0, len(ordered) - 1, _MAX_BINS).astype(np.int64)]
        bins = np.unique(ordered)
        num_cells = self.counts.shape[1]
        flat = self.cell_of[owners] * len(bins) + np.searchsorted(bins, values)
        histogram = np.bincount(flat, minlength=num_cells * len(bins)).reshape(num_cells, len(bins))
        reached = self.counts @ np.cumsum(histogram, axis=1, dtype=np.float64)
        total = reached[:, -1:]
        empty = total[:, 0] == 0
        return {q: np.where(empty, np.nan, bins[np.argmax(reached >= q * total - 1e-9, axis=1)]) for q in qs}

    def ratio(self, numerators: Floats, denominators: Floats) -> Floats:
        """sum(numerators) / sum(denominators) of each replicate; one of each per observation. NaN for 0 / 0."""
        num_cells = self.counts.shape[1]
        above = self.counts @ np.bincount(self.cell_of, numerators, num_cells)
        below = self.counts @ np.bincount(self.cell_of, denominators, num_cells)
        out: Floats = np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)
        return out

    def interval(self, replicates: Floats, confidence: float) -> Interval:
        """Two-sided. Replicates without a value are left out; nothing but those gives an unbounded interval."""
        low, high = expanded_tails(confidence, self.num_blocks)
        known = np.sort(replicates[~np.isnan(replicates)])
        if not len(known):
            return Interval(-math.inf, math.inf, confidence, self.num_blocks)
        first = max(0, math.floor(low * len(known)))
        last = min(len(known) - 1, math.ceil(high * len(known)) - 1)
        return Interval(float(known[first]), float(known[last]), confidence, self.num_blocks)


def expanded_tails(confidence: float, num_blocks: int) -> tuple[float, float]:
    """The quantiles of the replicates between which a two-sided interval lies."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"need 0 < confidence < 1, got {confidence}")
    z = t_quantile((1.0 + confidence) / 2.0, num_blocks - 1) * math.sqrt(num_blocks / (num_blocks - 1))
    return normal_cdf(-z), normal_cdf(z)


@lru_cache(maxsize=8)
def _draw(num_cells: int, num_blocks: int, num_resamples: int, seed: int) -> Floats:
    """Circular blocks: each starts at a random cell and goes on over the end to the beginning."""
    length = math.ceil(num_cells / num_blocks)
    rng = np.random.default_rng((seed, num_cells, num_blocks))
    starts = rng.integers(0, num_cells, (num_resamples, num_blocks))
    cells = (starts[:, :, None] + np.arange(length)) % num_cells
    flat = cells.reshape(num_resamples, -1) + np.arange(num_resamples)[:, None] * num_cells
    counts = np.bincount(flat.ravel(), minlength=num_resamples * num_cells).reshape(num_resamples, num_cells)
    out = counts.astype(np.float64)
    out.flags.writeable = False
    return out

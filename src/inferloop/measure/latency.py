"""One latency condensed: mean, certified percentiles and their intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from inferloop.measure.bootstrap import BlockBootstrap, Interval
from inferloop.measure.quantiles import min_samples, percentile, quantile
from inferloop.measure.samples import Samples

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999))
INTERVAL_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Latency:
    """In ms. `mean` and `max` are over successes, so read them beside the error rate; the percentiles count failures as
    +inf and are None where not certifiable. `successes` holds the same percentiles over successes alone. `intervals`
    are of the certified percentiles, by block bootstrap; empty where the series is too short for it."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    num_samples: int
    num_more_needed: dict[str, int]
    successes: dict[str, float | None]
    p90: float | None = None
    p999: float | None = None
    max: float | None = None
    intervals: dict[str, Interval] | None = None

    @classmethod
    def of(cls, samples: Samples, bootstrap: BlockBootstrap | None = None) -> Latency:
        """`bootstrap` resamples the owners of the samples."""
        ordered = samples.adjusted()
        seen = ordered[: len(samples.values)]
        n = samples.num_requests
        found = {name: percentile(ordered, q, num_independent=n) for name, q in QUANTILES}
        intervals: dict[str, Interval] = {}
        if bootstrap is not None and samples.num_total:
            values, owners = samples.pessimistic()
            certain = [q for name, q in QUANTILES if found[name].value is not None]
            made = bootstrap.quantiles(values, owners, certain)
            intervals = {name: bootstrap.interval(made[q], INTERVAL_CONFIDENCE) for name, q in QUANTILES if q in made}
        return cls(
            mean=float(np.mean(seen)) if len(seen) else None,
            p50=found["p50"].value,
            p95=found["p95"].value,
            p99=found["p99"].value,
            num_samples=n,
            num_more_needed={name: p.num_more_needed for name, p in found.items() if p.num_more_needed},
            successes={name: quantile(seen, q) if len(seen) and n >= min_samples(q) else None for name, q in QUANTILES},
            p90=found["p90"].value,
            p999=found["p999"].value,
            max=float(seen[-1]) if len(seen) else None,
            intervals=intervals,
        )

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: an infinite percentile is null and named in `infinite`."""
        percentiles = {name: getattr(self, name) for name, _ in QUANTILES}
        infinite = [name for name, value in percentiles.items() if value is not None and math.isinf(value)]
        return {
            "mean": self.mean,
            **{name: None if name in infinite else value for name, value in percentiles.items()},
            "max": self.max,
            "infinite": infinite,
            "num_samples": self.num_samples,
            "num_more_needed": self.num_more_needed,
            "successes": self.successes,
            "intervals": {name: interval.as_json() for name, interval in (self.intervals or {}).items()},
        }

"""Objectives: a metric, a quantile, a limit."""

from __future__ import annotations

from dataclasses import dataclass

LATENCY_METRICS = ("ttft_ms", "ttfat_ms", "tpot_ms", "itl_ms", "ttlt_ms", "queue_ms")


@dataclass(frozen=True, slots=True)
class Objective:
    """`quantile` of `metric` must not exceed `limit` (in the unit that the metric's name carries)."""

    metric: str
    quantile: float
    limit: float

    @property
    def label(self) -> str:
        return f"{self.metric.removesuffix('_ms')} p{self.quantile * 100:g} <= {self.limit:g} ms"


@dataclass(frozen=True, slots=True)
class Slo:
    """What the service promises itself. `max_error_rate` None: not declared."""

    objectives: tuple[Objective, ...] = ()
    max_error_rate: float | None = None
    window_s: float = 28 * 86400.0
    scope: tuple[str, ...] = ()
    """Traffic classes it holds for; empty means all."""
    network_ms: float = 0.0
    """Spent before the service sees the request; taken off every latency limit counted from the user."""

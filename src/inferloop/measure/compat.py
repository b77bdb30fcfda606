"""The numbers as other load generators define them, from our stamps, so that results can be compared at all.

Names that are equal do not mean the same: what one calls TPOT holds the wait for the first token, what another calls
ITL is a gap between chunks. Each number here carries its definition and the version of the tool that was read. All of
them are over successful requests alone, as those tools print them; failures have to be read beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inferloop.core.units import NS_PER_MS
from inferloop.measure.columns import Floats
from inferloop.measure.compat_tools import TOOLS, ToolMetric
from inferloop.measure.timing import RequestTiming

__all__ = ["PERCENTILES", "TOOLS", "CompatNumber", "CompatView", "compat_view"]

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class CompatNumber:
    """In ms; None without a sample. `num_samples` is of samples, weights aside."""

    name: str
    definition: str
    num_samples: int
    mean: float | None
    percentiles: dict[str, float | None]

    def as_json(self) -> dict[str, Any]:
        told = {"name": self.name, "definition": self.definition, "num_samples": self.num_samples}
        return {**told, "mean": self.mean, **self.percentiles}


@dataclass(frozen=True, slots=True)
class CompatView:
    """What a tool would print of these requests, in ms."""

    tool: str
    read: str
    counts: str
    numbers: tuple[CompatNumber, ...]
    num_used: int
    num_left_out: int

    def as_json(self) -> dict[str, Any]:
        return {
            "tool": self.tool,
            "read": self.read,
            "counts": self.counts,
            "num_used": self.num_used,
            "num_left_out": self.num_left_out,
            "numbers": [number.as_json() for number in self.numbers],
        }


def compat_view(tool: str, requests: Sequence[RequestTiming]) -> CompatView:
    """`tool` is a key of TOOLS; raises KeyError for another."""
    known = TOOLS[tool]
    used = [r for r in requests if known.used(r)]
    numbers = tuple(_number(metric, used, weighted=known.weighted) for metric in known.metrics)
    return CompatView(known.name, known.read, known.counts, numbers, len(used), len(requests) - len(used))


def _number(metric: ToolMetric, requests: Sequence[RequestTiming], *, weighted: bool) -> CompatNumber:
    pairs = [pair for r in requests for pair in metric.of(r)]
    kept = np.array([(v, w) for v, w in pairs if w > 0], np.float64).reshape(-1, 2)
    names = [f"p{p}" for p in PERCENTILES]
    if not len(kept):
        return CompatNumber(metric.name, metric.definition, 0, None, dict.fromkeys(names))
    values, weights = kept[:, 0] / NS_PER_MS, kept[:, 1]
    found = _weighted(values, weights) if weighted else [float(np.percentile(values, p)) for p in PERCENTILES]
    mean = float(np.average(values, weights=weights))
    return CompatNumber(metric.name, metric.definition, len(kept), mean, dict(zip(names, found, strict=True)))


def _weighted(values: Floats, weights: Floats) -> list[float]:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    places = [min(int(np.searchsorted(reached, p / 100 - 1e-12)), len(values) - 1) for p in PERCENTILES]
    return [float(values[order[i]]) for i in places]

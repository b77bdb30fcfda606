"""How many replicas a peak needs, from what one replica was measured to carry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from inferloop.core.digest import plain
from inferloop.core.errors import UsageError
from inferloop.measure.frontier import Capacity

DEFAULT_RHO = 0.7
"""Share of its capacity that a replica is loaded to at the peak. Near 1 queues grow without bound, and a minute's peak
hides seconds that are higher."""
DEFAULT_FAILURE_HEADROOM = 1
"""Replicas that may be lost at the peak while the objective still holds."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """`needed` = ceil(peak / (c * rho)) + failure_headroom; None when nothing is known to be carried:
    it does not fit, or no rate could be certified; `reason` says which.

    `low` and `high` are the same with the ends of the capacity's bracket: the replicas needed at best and at worst.
    `high` is None when the worst case carries nothing.
    """

    fits: bool
    peak_qps: float
    capacity_qps: float
    rho: float
    failure_headroom: int
    needed: int | None
    low: int | None
    high: int | None
    reason: str
    undecided: bool = False
    """No rate could be certified, so whether it fits is not known; `fits` is then False."""

    def as_json(self, *, started: int | None = None) -> dict[str, Any]:
        """`replicas` of summary.json."""
        out: dict[str, Any] = {**plain(self), "started": started}
        if started is not None and self.needed is not None:
            out["missing"] = max(0, self.needed - started)
        return out


def size(
    peak_qps: float,
    capacity: Capacity,
    *,
    rho: float = DEFAULT_RHO,
    failure_headroom: int = DEFAULT_FAILURE_HEADROOM,
) -> Sizing:
    """Replicas for a peak rate in queries per second. Raises UsageError for parameters that mean nothing.

    A capacity that was interpolated is used as it is; its bracket gives `low` and `high`, where it lies in that.
    """
    if not (math.isfinite(peak_qps) and peak_qps > 0):
        raise UsageError(f"the peak rate must be above 0, not {peak_qps}")
    if not 0 < rho < 1:
        raise UsageError(f"rho must be between 0 and 1, not {rho}")
    if failure_headroom < 0:
        raise UsageError(f"failure headroom must not be negative, not {failure_headroom}")
    c = capacity.qps if math.isfinite(capacity.qps) else 0.0
    if c <= 0:
        undecided = capacity.method == "undecided"
        what = "cannot be sized" if undecided else "does not fit: one replica keeps the objective at no rate"
        reason = f"{what} ({capacity.reason})"
        return Sizing(False, peak_qps, 0.0, rho, failure_headroom, None, None, None, reason, undecided)
    needed = replicas_for(peak_qps, c, rho) + failure_headroom
    best = c if capacity.high is None else capacity.high
    low = replicas_for(peak_qps, best, rho) + failure_headroom
    high = replicas_for(peak_qps, min(c, capacity.low), rho) + failure_headroom if capacity.low > 0 else None
    reason = (
        f"ceil(peak {peak_qps:g}/s / (capacity {c:.4g}/s * rho {rho:g})) = {needed - failure_headroom} carry the peak, "
        f"{failure_headroom} more may be lost"
    )
    return Sizing(True, peak_qps, c, rho, failure_headroom, needed, low, high, reason)


def replicas_for(peak_qps: float, capacity_qps: float, rho: float) -> int:
    """ceil(peak / (c * rho)), at least 1; a quotient that is whole but for rounding is not rounded up."""
    return max(1, math.ceil(peak_qps / (capacity_qps * rho) - 1e-9))

"""Whether a service keeps up with what it is given: arrivals against completions over a window.

Latency alone cannot tell. A queue that grows takes time to become slow, so a short window passes at any load, and how
slow it becomes says more of the window's length than of the service. What is in flight at the end of a window beyond
what was at its beginning is exactly what arrived and was not completed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from inferloop.core.digest import plain
from inferloop.core.units import NS_PER_S
from inferloop.measure.columns import CUT, Columns, Floats
from inferloop.measure.samples import Requests
from inferloop.measure.students_t import t_quantile

Kept = Literal["saturated", "sustained", "undecided"]
START_SHARE = 0.25
"""Of the window, that belongs to the filling of the pipeline and is not looked at."""
NUM_BATCHES = 8
"""Few, because the balance of a queue in equilibrium gets more exact with the length of a batch."""
_DOF = NUM_BATCHES - 2
_SURE, _LIKELY = 0.99, 0.95
TOLERANCE = 0.05
"""Of the arrivals: a growth that is certainly smaller is none."""
_LEAST_GROWTH = 0.02
"""Of the arrivals: what a smaller certain growth may be is the last of the filling."""
_LEAST_REQUESTS = 4 * NUM_BATCHES


@dataclass(frozen=True, slots=True)
class Balance:
    """Per second, over the window without its start. `growth` = (arrivals - completions) / arrivals.

    saturated  the growth is certainly positive (99 %) and 2 % at least
    sustained  it is certainly (95 %) below `tolerance`: 5 %, or what so few requests can tell at all, 1.5 / sqrt(n)
    undecided  neither: the window is too short
    """

    verdict: Kept
    arrived_qps: float
    completed_qps: float
    completed_error: float
    """Standard error of `completed_qps`, by batch means. It is the service's speed where it is saturated."""
    growth: float
    low: float
    high: float
    tolerance: float
    num_requests: int
    span_s: float
    """Of the whole window."""

    @property
    def reason(self) -> str:
        told = f"{self.arrived_qps:.3g}/s arrive, {self.completed_qps:.3g}/s are completed"
        if self.verdict == "saturated":
            return f"{told}: the queue grows"
        if self.verdict == "sustained":
            return f"{told}: the queue holds"
        return f"{told}: too short to tell whether the queue grows (by {max(0.0, self.low):.0%} to {self.high:.0%})"

    def as_json(self) -> dict[str, Any]:
        return {**plain(self), "reason": self.reason}


def balance_of(requests: Requests, since_ns: int | None = None, until_ns: int | None = None) -> Balance | None:
    """From all requests of a level, those before the window included. The window lasts from `since_ns` (the first
    arrival) to `until_ns` (the last, or the cut-off when that came first). None for too few requests.

    The window without its start is cut into batches. Batch means of the increments of the number in flight give the
    error of their mean: in a saturated service they are independent, in one that keeps up they take each other back, so
    the bounds err to the careful side. Claims are about what really arrived, not about the rate it was drawn for: the
    part of the scatter that the arrivals explain (regression on the batches' own arrivals) is not counted.
    """
    c = Columns.of(requests)
    if not len(c):
        return None
    due = np.sort(c.start(from_intended=True))
    cut = c.end[c.status == CUT]
    first = int(due[0]) if since_ns is None else since_ns
    last = min(int(due[-1]), int(cut.min()) if len(cut) else int(due[-1])) if until_ns is None else until_ns
    edges = np.linspace(first + START_SHARE * (last - first), last, NUM_BATCHES + 1)
    arrived = np.diff(np.searchsorted(due, edges, side="right")).astype(np.float64)
    done = np.sort(c.end[c.status != CUT])
    completed = np.diff(np.searchsorted(done, edges, side="right")).astype(np.float64)
    num = int(arrived.sum())
    if num < _LEAST_REQUESTS:
        return None
    growth = float((arrived - completed).sum()) / num
    error = _error(arrived, completed) * NUM_BATCHES / num
    low, high = growth - t_quantile(_SURE, _DOF) * error, growth + t_quantile(_LIKELY, _DOF) * error
    tolerance = max(TOLERANCE, 1.5 / math.sqrt(num))
    verdict: Kept = "undecided"
    if low > 0 and growth >= _LEAST_GROWTH:
        verdict = "saturated"
    elif high < tolerance:
        verdict = "sustained"
    batch_s = (last - first) * (1 - START_SHARE) / NUM_BATCHES / NS_PER_S
    return Balance(
        verdict=verdict,
        arrived_qps=float(arrived.mean()) / batch_s,
        completed_qps=float(completed.mean()) / batch_s,
        completed_error=float(completed.std(ddof=1)) / math.sqrt(NUM_BATCHES) / batch_s,
        growth=growth,
        low=low,
        high=high,
        tolerance=tolerance,
        num_requests=num,
        span_s=(last - first) / NS_PER_S,
    )


def _error(arrived: Floats, completed: Floats) -> float:
    """Standard error of the mean increment of a batch, given the arrivals."""
    increments = arrived - completed
    x, y = arrived - arrived.mean(), increments - increments.mean()
    spread = float(x @ x)
    explained = min(max(float(x @ y) / spread, 0.0), 1.0) if spread > 0 else 0.0
    rest = y - explained * x
    return math.sqrt(float(rest @ rest) / _DOF / NUM_BATCHES)

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
"""Few, because the mean of a queue in equilibrium gets more exact with the length of a batch."""
_PER_BATCH = 32
"""Instants at which the number in flight is looked at."""
_DOF = NUM_BATCHES - 3
_INTEGRATED = 1.5
"""Means over batches of a random walk have increments that are alike from one to the next: the variance of their mean
is so much larger than that of as many independent ones."""
_SURE, _LIKELY = 0.99, 0.9
TOLERANCE = 0.05
"""Of the arrivals: a growth that is certainly smaller is none."""
_LEAST_GROWTH = 0.02
"""Of the arrivals: what a smaller certain growth may be is the last of the filling."""
_LEAST_REQUESTS = 4 * NUM_BATCHES


@dataclass(frozen=True, slots=True)
class Balance:
    """Per second, over the window without its start. `growth` is that of the number in flight, as a share of the
    arrivals.

    saturated  the growth is certainly positive (99 %) and 2 % at least
    sustained  it is likely (90 %) below `tolerance`: 5 %, or what so few requests can tell at all, 2 / sqrt(n)
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
    turnovers: float | None = None
    """How often what is in flight was exchanged: the window, in mean times from arrival to completion (Little)."""

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

    The window without its start is cut into batches. The mean number in flight of each is a random walk where the
    service is saturated, whose increments tell how fast it grows and how certain that is; where the service keeps up,
    the increments take each other back, so the bounds err to the careful side. Claims are about what really arrived,
    not about the rate it was drawn for: the part of the scatter that the arrivals explain (regression of the increments
    on those of the arrivals) is not counted.
    """
    c = Columns.of(requests)
    if not len(c):
        return None
    due = np.sort(c.start(from_intended=True))
    cut = c.end[c.status == CUT]
    first = int(due[0]) if since_ns is None else since_ns
    last = min(int(due[-1]), int(cut.min()) if len(cut) else int(due[-1])) if until_ns is None else until_ns
    begin = first + START_SHARE * (last - first)
    instants = np.linspace(begin, last, NUM_BATCHES * _PER_BATCH + 1)
    done = np.sort(c.end[c.status != CUT])
    arrived, completed = (np.searchsorted(t, instants, side="right").astype(np.float64) for t in (due, done))
    num = int(arrived[-1] - arrived[0])
    if num < _LEAST_REQUESTS:
        return None
    excess = arrived - np.linspace(arrived[0], arrived[-1], len(arrived))
    in_flight = arrived - completed
    steps = [np.diff(v[1:].reshape(NUM_BATCHES, _PER_BATCH).mean(axis=1)) for v in (in_flight, excess)]
    scale = NUM_BATCHES / num
    growth, error = float(steps[0].mean()) * scale, _error(*steps) * scale
    low, high = growth - t_quantile(_SURE, _DOF) * error, growth + t_quantile(_LIKELY, _DOF) * error
    tolerance = max(TOLERANCE, 2 / math.sqrt(num))
    verdict: Kept = "undecided"
    if low > 0 and growth >= _LEAST_GROWTH:
        verdict = "saturated"
    elif high < tolerance:
        verdict = "sustained"
    window_s = (last - begin) / NS_PER_S
    per_batch = np.diff(completed[::_PER_BATCH])
    return Balance(
        verdict=verdict,
        arrived_qps=num / window_s,
        completed_qps=float(per_batch.sum()) / window_s,
        completed_error=float(per_batch.std(ddof=1)) * math.sqrt(NUM_BATCHES) / window_s,
        growth=growth,
        low=low,
        high=high,
        tolerance=tolerance,
        num_requests=num,
        span_s=(last - first) / NS_PER_S,
        turnovers=num / max(float(in_flight.mean()), 1e-9),
    )


def _error(steps: Floats, arrivals: Floats) -> float:
    """Standard error of the mean step from batch to batch, given the arrivals."""
    x, y = arrivals - arrivals.mean(), steps - steps.mean()
    spread = float(x @ x)
    explained = min(max(float(x @ y) / spread, 0.0), 1.0) if spread > 0 else 0.0
    rest = y - explained * x
    return math.sqrt(_INTEGRATED * float(rest @ rest) / _DOF / len(rest))

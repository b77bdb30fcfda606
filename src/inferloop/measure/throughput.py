"""How many requests a service completed per second, whatever sent them: open arrivals, users who wait, or one burst.

What others print, completions over the time from the first send to the last end, is what a whole run came to, filling
and draining included: never too much, and half too little where a few long answers end long after all others. The
completions alone, (n - 1) / (last - first), leave the filling out, but they begin and end with a completion: of answers
that come in waves, k of them, the first wave is counted and its time is not, k / (k - 1) times too many.

So the rate is the slope of the count of completions over time by least squares, in which each completion stands at the
middle of its step: waves, an even flow and a random one all have the slope of their rate. What ends after the last send
belongs to the draining and is left out, unless it is most of it. Two bounds hold whatever the stamps are: the
completions after the first request took no more than the whole time, and no steady state with at most M in flight, each
for W on average, completes more than M / W (Little 1961).
"""

from __future__ import annotations

import numpy as np

from inferloop.core.units import NS_PER_S
from inferloop.measure.bootstrap import BlockBootstrap, Interval
from inferloop.measure.columns import ABSENT, OK, Bools, Columns, Floats, Ints
from inferloop.measure.latency import INTERVAL_CONFIDENCE
from inferloop.measure.samples import Requests

_CELLS = 64
"""Of equal length, that the time of the completions is cut into for their rate's interval."""
_FEWEST_SHARE = 0.5
"""Of the completions: fewer before the last send tell less than all of them."""
_SLOPE_VARIANCE = 1.2
"""Of a least squares slope of a count, in units of that of the count over the time (a random walk with drift)."""


def achieved_rate(requests: Requests) -> tuple[float | None, str]:
    """Successful completions per second, and what told them: "completions", their slope; "span", the lower bound; or
    "in flight", the upper bound, where all were under way at once. None when nothing completed, or in no time."""
    c = Columns.of(requests)
    ok = c.status == OK
    if not ok.any():
        return None, "completions"
    span = int(c.end[ok].max() - c.send.min()) / NS_PER_S
    if span <= 0:
        return None, "span"
    counted = _counted(c)
    # Users who wait are in flight until the last of their answers. What arrives by itself and ends after the last send
    # belongs to a load that is no longer seen.
    bounding = counted if (c.intended[ok] != ABSENT).all() else ok
    least, most = (int(ok.sum()) - 1) / span, _most(c.send[bounding], c.end[bounding])
    rate = _slope(np.sort(c.end[counted]))
    if rate is None or rate >= most:
        return most, "in flight"
    return (rate, "completions") if rate > least else (least, "span")


def achieved_interval(requests: Requests) -> Interval | None:
    """Of `achieved_rate` where the completions tell it: it scatters as their number in equal cells of the time does."""
    c = Columns.of(requests)
    rate, basis = achieved_rate(c)
    if rate is None or basis != "completions":
        return None
    done = np.sort(c.end[_counted(c)])
    num_cells = min(_CELLS, len(done) - 1)
    edges = np.linspace(done[0], done[-1], num_cells + 1)
    bootstrap = BlockBootstrap.of(edges[:-1].astype(np.int64))
    if bootstrap is None:
        return None
    counts: Floats = np.histogram(done[1:], edges)[0].astype(np.float64)
    share = bootstrap.ratio(counts, np.full(num_cells, counts.mean()))
    wider = 1 + (share - 1) * _SLOPE_VARIANCE**0.5
    return bootstrap.interval(rate * wider, INTERVAL_CONFIDENCE)


def _counted(c: Columns) -> Bools:
    done = c.status == OK
    before: Bools = done & (c.end <= c.send.max())
    return before if before.sum() >= max(2.0, _FEWEST_SHARE * done.sum()) else done


def _slope(done: Ints) -> float | None:
    """Per second. None where all came at one instant."""
    from_mean = (done - done[0]) / NS_PER_S
    from_mean -= from_mean.mean()
    spread = float(from_mean @ from_mean)
    return float(from_mean @ np.arange(len(done))) / spread if spread > 0 else None


def _most(send: Ints, end: Ints) -> float:
    """M / W."""
    started = np.sort(send)
    in_flight = np.arange(1, len(started) + 1) - np.searchsorted(np.sort(end), started, side="right")
    mean_s = float((end - send).mean()) / NS_PER_S
    return max(1, int(in_flight.max())) / mean_s if mean_s > 0 else float("inf")

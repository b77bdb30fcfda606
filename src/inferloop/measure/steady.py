"""Where the steady state of a run begins: MSER-5 on the number in flight and on TTFT.

A run starts empty, so its first requests meet a service that nobody else uses yet, or one burst that meets itself. MSER
(White 1997, "An effective truncation heuristic for bias reduction in simulation output") leaves out as many first
observations as make the standard error of the mean of the rest smallest; MSER-5 (White, Cobb and Spratt 2000) does so
on means of five.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferloop.core.units import NS_PER_MS
from inferloop.measure.columns import ABSENT, CUT, FAILED, OK, Columns, Floats, Ints
from inferloop.measure.samples import Requests

BATCH = 5
_LEAST_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Truncation:
    """`index` observations are left out. `reached` is False when the least standard error lies at the end of what may
    be left out (half of the series), or the series is too short: then no steady state was seen."""

    index: int
    reached: bool


@dataclass(frozen=True, slots=True)
class SteadyStart:
    """The first `index` requests, in the order in which they were sent, belong to the start; the steady state holds
    requests sent from `t_ns` on. None for no request at all."""

    index: int
    t_ns: int | None
    reached: bool
    in_flight: Truncation
    ttft: Truncation


def mser5(series: Sequence[float] | Floats) -> Truncation:
    """The truncation of one series of finite observations in time order."""
    values = np.asarray(series, np.float64)
    if not np.isfinite(values).all():
        raise ValueError("a series holds what is not finite")
    num = len(values) // BATCH
    if num < _LEAST_BATCHES:
        return Truncation(0, False)
    means = values[: num * BATCH].reshape(num, BATCH).mean(axis=1)
    centred = means - means.mean()  # else a large mean would drown the differences of the squares
    left = np.arange(num, 0, -1)
    total, squares = np.cumsum(centred[::-1])[::-1], np.cumsum(centred[::-1] ** 2)[::-1]
    spread = np.maximum(0.0, squares - total**2 / left)
    spread[spread < 1e-12 * max(spread[0], 1e-300)] = 0.0  # what rounding leaves of a constant
    most = num // 2
    error = (spread / left**2)[: most + 1]
    best = int(np.argmin(error))
    return Truncation(best * BATCH, bool(best < most or error[best] == 0.0))


def steady_start(requests: Requests) -> SteadyStart:
    """From the stamps of all requests of a load level, warm-up included. Failed and unfinished requests are in flight
    like any other; their TTFT, as far as it is unknown, takes no part."""
    c = Columns.of(requests)
    order = np.argsort(c.send, kind="stable")
    if not len(order):
        nothing = Truncation(0, False)
        return SteadyStart(0, None, False, nothing, nothing)
    in_flight = mser5(in_flight_at_sends(c).astype(np.float64))
    told = order[(c.first != ABSENT)[order] & np.isin(c.status[order], (OK, FAILED, CUT))]
    ttft = mser5((c.first[told] - c.send[told]) / NS_PER_MS)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    ttft_index = int(place[told[ttft.index]]) if ttft.index else 0
    index = max(in_flight.index, ttft_index)
    return SteadyStart(index, int(c.send[order[index]]), in_flight.reached and ttft.reached, in_flight, ttft)


def in_flight_at_sends(requests: Requests) -> Ints:
    """For each request, in the order of their sends, how many others were in flight when it was sent."""
    c = Columns.of(requests)
    sends, ends = np.sort(c.send), np.sort(c.end)
    started = np.arange(len(sends))
    return started - np.minimum(started, np.searchsorted(ends, sends, side="right"))

"""Whether a service is given more than it can do: the number in flight and the TTFT both keep growing.

One of them alone proves nothing: the number in flight also grows while long answers fill the pipeline, and TTFT while
prompts get longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.columns import ABSENT, Columns, Floats
from inferloop.measure.samples import Requests
from inferloop.measure.students_t import t_quantile

WINDOW_S = 120.0
LEAST_SPAN_S = 30.0
CONFIDENCE = 0.99
_BATCHES = 12
_LEAST_PER_BATCH = 2
_LEAST_GROWTH = 0.25
"""Of the mean, over the window: less is drift that a longer run would show and no reason to end one."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Per second, with the one-sided lower bound by Student's t; `mean` of the series over the window."""

    per_s: float
    low: float
    mean: float


@dataclass(frozen=True, slots=True)
class Saturation:
    """`saturated`: both series certainly grow, and by a quarter of their mean at least. None where too little was seen;
    `reason` in words."""

    saturated: bool
    in_flight: Slope | None
    ttft_ms: Slope | None
    reason: str


def over_saturated(
    in_flight: Sequence[tuple[float, float]] | Floats,
    ttft_ms: Sequence[tuple[float, float]] | Floats,
    now_s: float,
    *,
    window_s: float = WINDOW_S,
    least_span_s: float = LEAST_SPAN_S,
    confidence: float = CONFIDENCE,
    least_ttft_ms: float = 0.0,
) -> Saturation:
    """From (time in s, value) pairs, of which those of the last `window_s` before `now_s` count. `least_ttft_ms`: no
    service that answers sooner on average is called saturated."""
    flight, wait = (
        _slope(np.asarray(s, np.float64).reshape(-1, 2), now_s, window_s, least_span_s, confidence)
        for s in (in_flight, ttft_ms)
    )
    if flight is None or wait is None:
        return Saturation(False, flight, wait, f"too little was seen: {least_span_s:g} s are needed")
    growing = [_grows(slope, window_s) for slope in (flight, wait)]
    if not all(growing):
        still = "in flight" if not growing[0] else "TTFT"
        return Saturation(False, flight, wait, f"{still} does not certainly grow")
    if wait.mean < least_ttft_ms:
        return Saturation(False, flight, wait, f"TTFT is {wait.mean:.3g} ms on average, below {least_ttft_ms:g} ms")
    words = f"in flight grows by {flight.per_s:.3g} and TTFT by {wait.per_s:.3g} ms a second"
    return Saturation(True, flight, wait, words)


def saturation_of(requests: Requests, now_ns: int | None = None, **options: float) -> Saturation:
    """From finished requests and those cut off. `now_ns` defaults to the last send: after it the number in flight only
    falls. A TTFT counts at the instant of its send, so that slow ones do not come late into the series; the options are
    those of `over_saturated`."""
    c = Columns.of(requests)
    if not len(c):
        return over_saturated((), (), 0.0, **options)
    now = int(c.send.max()) if now_ns is None else now_ns
    times = np.concatenate([c.send, c.end])
    change = np.concatenate([np.ones(len(c)), -np.ones(len(c))])
    order = np.lexsort((change, times))
    gauge = np.column_stack([times[order] / NS_PER_S, np.cumsum(change[order])])
    told = c.first != ABSENT
    waits = np.column_stack([c.send[told] / NS_PER_S, (c.first[told] - c.send[told]) / NS_PER_MS])
    return over_saturated(gauge, waits, now / NS_PER_S, **options)


def _grows(slope: Slope, window_s: float) -> bool:
    return slope.low > 0 and slope.per_s * window_s >= _LEAST_GROWTH * slope.mean


def _slope(series: Floats, now_s: float, window_s: float, least_span_s: float, confidence: float) -> Slope | None:
    """Ordinary least squares on means of equal parts of the time: single values of a queue are too much alike for the
    bound to mean anything."""
    series = series[(series[:, 0] > now_s - window_s) & (series[:, 0] <= now_s)]
    if len(series) < _BATCHES * _LEAST_PER_BATCH:
        return None
    start, span = float(series[:, 0].min()), float(np.ptp(series[:, 0]))
    if span < least_span_s:
        return None
    part = np.minimum((series[:, 0] - start) / span * _BATCHES, _BATCHES - 1).astype(np.int64)
    num = np.bincount(part, minlength=_BATCHES)
    if np.count_nonzero(num) < _BATCHES // 2:
        return None
    seen = num > 0
    t, y = (np.bincount(part, series[:, k], _BATCHES)[seen] / num[seen] for k in (0, 1))
    dof = len(t) - 2
    centred = t - t.mean()
    slope = float(centred @ y / (centred @ centred))
    rest = y - y.mean() - slope * centred
    error = math.sqrt(float(rest @ rest) / dof / float(centred @ centred))
    return Slope(slope, slope - t_quantile(confidence, dof) * error, float(series[:, 1].mean()))

"""When requests come. Times are whole nanoseconds, so that sums are exact and equal on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile

from inferloop.contract.course import Course
from inferloop.contract.draws import Draws
from inferloop.core.errors import UsageError, nearest
from inferloop.core.units import NS_PER_S

OPEN_PROCESSES = ("poisson", "gamma", "constant")
AT_ONCE = ("burst", "serial")
"""burst: all at the start. serial: the client's own loop decides; times only keep the order."""


def arrival_times_ns(
    process: str,
    *,
    qps: float | None,
    cv: float,
    num_requests: int | None,
    duration_s: float | None,
    draws: Draws,
    course: Course | None = None,
) -> list[int]:
    """Ascending offsets from the start of the window. `qps` times the course is the rate; without one it is steady.

    Gaps are never rescaled to make the total come out: the counts of a Poisson process vary, and that variance is
    what queues are made of. `duration_s` keeps what arrives before it; `num_requests` counts; both: whichever is first.
    Raises UsageError for an unknown process, or an open one without a rate.
    """
    if process in AT_ONCE:
        if num_requests is None:
            raise UsageError(f"{process} arrivals need a number of requests")
        return [0] * num_requests
    if process not in OPEN_PROCESSES:
        valid = (*OPEN_PROCESSES, *AT_ONCE, "closed", "profile", "trace")
        close = nearest(process, valid)
        hint = f"did you mean {close}?" if close else f"valid: {', '.join(valid)}"
        raise UsageError(f"{process!r} arrivals cannot be sampled ({hint})")
    if qps is None or not 0 < qps < float("inf"):
        raise UsageError(f"{process} arrivals need a rate above 0, not {qps}")
    if num_requests is None and duration_s is None:
        raise UsageError("say how many requests, or for how long")
    times = _times(process, qps, cv, draws)
    if course is not None:
        times = _rescaled(times, course)
    if duration_s is not None:
        end_ns = round(duration_s * NS_PER_S)
        times = takewhile(lambda t: t < end_ns, times)
    return list(islice(times, num_requests))


def _times(process: str, qps: float, cv: float, draws: Draws) -> Iterator[int]:
    mean_ns = NS_PER_S / qps
    if process == "constant":
        index = 0
        while True:
            yield round(index * mean_ns)
            index += 1
    shape = 1.0 / (cv * cv)
    now_ns = 0
    while True:
        gap = draws.exponential() if process == "poisson" else draws.gamma(shape) / shape
        now_ns += round(gap * mean_ns)
        yield now_ns


def _rescaled(times: Iterator[int], course: Course) -> Iterator[int]:
    """The same arrivals on the clock of the course; they end where it does."""
    for t_ns in times:
        t_s = course.time_of(t_ns / NS_PER_S)
        if t_s is None:
            return
        yield round(t_s * NS_PER_S)

"""Little's law (Little 1961): the mean number in flight L equals the arrival rate times the mean time in system W.

It ties three quantities that are counted in different ways, so a lost, doubled or misdated record shows up as a
difference. L comes from the load generator's own gauge when it has one, else from the stamps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inferloop.core.units import NS_PER_S
from inferloop.measure.timing import RequestTiming

TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class LittleCheck:
    """`difference` is |L - lambda W| / max(L, lambda W), 0 for an idle system."""

    in_flight: float
    arrivals_per_s: float
    mean_time_s: float
    difference: float
    ok: bool


def time_averaged_in_flight(spans: Iterable[tuple[int, int]], start_ns: int, end_ns: int) -> float:
    """Mean number of spans open at an instant of [start_ns, end_ns]. Raises ValueError for an empty window."""
    if end_ns <= start_ns:
        raise ValueError(f"empty window: {start_ns} .. {end_ns}")
    inside = sum(max(0, min(end, end_ns) - max(begin, start_ns)) for begin, end in spans)
    return inside / (end_ns - start_ns)


def check(
    requests: Sequence[RequestTiming], *, in_flight: float | None = None, tolerance: float = TOLERANCE
) -> LittleCheck | None:
    """Over the whole span of the requests, first send to last end. None when there is nothing to check.

    `in_flight` is an independently counted mean over the same span. Without it L is taken from the stamps, and then
    the check only finds records whose times contradict each other.
    """
    if not requests:
        return None
    start = min(r.t_send_ns for r in requests)
    end = max(r.t_end_ns for r in requests)
    if end <= start:
        return None
    seconds = (end - start) / NS_PER_S
    measured = in_flight
    if measured is None:
        measured = time_averaged_in_flight(((r.t_send_ns, r.t_end_ns) for r in requests), start, end)
    arrivals_per_s = len(requests) / seconds
    mean_time_s = sum(r.t_end_ns - r.t_send_ns for r in requests) / len(requests) / NS_PER_S
    expected = arrivals_per_s * mean_time_s
    largest = max(measured, expected)
    difference = abs(measured - expected) / largest if largest > 0 else 0.0
    return LittleCheck(measured, arrivals_per_s, mean_time_s, difference, difference <= tolerance)

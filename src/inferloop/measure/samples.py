"""A metric's samples over a set of requests: what was seen, what failed, what the cut-off hid.

Failures never leave the distribution: a request that failed counts as +inf in every latency. A request that was
unfinished at the cut-off is right-censored: its value is only known to exceed the time that had passed. Mistakes of the
caller (http_4xx) and faults of the load generator (client) say nothing about the service; they are left out here and
counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inferloop.core.units import ns_to_ms
from inferloop.measure import timing
from inferloop.measure.timing import RequestTiming

CENSORED = "censored"
NOT_THE_SERVICE = frozenset({"http_4xx", "client"})
"""Error classes that say nothing about the service."""
ERROR_CLASSES = (
    "http_4xx",
    "http_429",
    "http_5xx",
    "connect",
    "timeout",
    "truncated",
    "empty_stream",
    "protocol",
    "client",
)


def concerns_service(r: RequestTiming) -> bool:
    """False for errors that the caller or the load generator made."""
    return r.error not in NOT_THE_SERVICE


def is_failure(r: RequestTiming) -> bool:
    """Whether it spends the service's error budget."""
    return r.error is not None and r.error != CENSORED and concerns_service(r)


@dataclass(frozen=True, slots=True)
class Samples:
    """In ms. `num_failed` counts samples that failures stand for. `num_requests` is the number of requests behind all
    of them: the independent observations."""

    values: tuple[float, ...]
    num_failed: int
    hidden: tuple[float, ...]
    """Lower bounds of what the cut-off hid."""
    num_requests: int

    def adjusted(self) -> list[float]:
        """Sorted ascending, failures and hidden values as +inf: what percentiles are taken of."""
        return [*sorted(self.values), *[math.inf] * (self.num_failed + len(self.hidden))]

    @property
    def num_total(self) -> int:
        return len(self.values) + self.num_failed + len(self.hidden)

    def num_over(self, limit: float) -> tuple[int, int]:
        """(certainly, possibly) over the limit."""
        certain = self.num_failed + sum(v > limit for v in self.values) + sum(v > limit for v in self.hidden)
        return certain, certain + sum(v <= limit for v in self.hidden)


def collect(metric: str, requests: Iterable[RequestTiming], *, from_intended: bool = False) -> Samples:
    """Samples of `metric` (a name of core.slo.LATENCY_METRICS). `from_intended` counts TTFT and TTLT from the
    instant the request should have been sent, where there is one. Token gaps are pooled over the requests; there a
    failed or unfinished request weighs as many as a successful one has on average. Raises KeyError for an unknown
    metric."""
    value_of = _METRICS[metric]
    values: list[float] = []
    cut: list[tuple[list[float], list[float]]] = []
    num_failed = num_told = num_cut = 0
    for r in requests:
        if not concerns_service(r):
            continue
        if r.error == CENSORED:
            cut.append(_censored(metric, r, from_intended))
        elif r.error is not None:
            num_failed += metric != "queue_ms"  # a failed answer tells no queue time; that alone proves nothing
        else:
            seen = value_of(r, from_intended)
            values += seen
            num_told += bool(seen)
    weight = max(1, round(len(values) / num_told)) if num_told else 1
    hidden: list[float] = []
    for seen, bounds in cut:
        values += seen
        hidden += bounds
        if bounds:  # of what else it would have told nothing is known
            hidden += [0.0] * (weight - len(seen) - len(bounds))
        num_cut += bool(seen or bounds)
    return Samples(tuple(values), num_failed * weight, tuple(hidden), num_told + num_failed + num_cut)


def _censored(metric: str, r: RequestTiming, from_intended: bool) -> tuple[list[float], list[float]]:
    """(values already known, lower bounds of those not yet known) of a request that the cut-off interrupted."""
    start = r.t_intended_ns if from_intended and r.t_intended_ns is not None else r.t_send_ns
    elapsed = max(0.0, ns_to_ms(r.t_end_ns - start))
    if metric == "ttft_ms":
        seen = _ttft(r, from_intended)
        return (seen, []) if seen else ([], [elapsed])
    if metric == "ttlt_ms":
        return [], [elapsed]
    if metric == "itl_ms":
        return timing.itl_ms(r), [ns_to_ms(r.t_end_ns - r.chunks[-1].t_ns)] if r.chunks else [0.0]
    if metric == "queue_ms":
        return _known(r.queue_ms), []
    return [], [0.0]


def _known(value: float | None) -> list[float]:
    return [] if value is None else [value]


def _ttft(r: RequestTiming, from_intended: bool) -> list[float]:
    use_intended = from_intended and r.t_intended_ns is not None
    return _known(timing.response_ttft_ms(r) if use_intended else timing.ttft_ms(r))


def _ttlt(r: RequestTiming, from_intended: bool) -> list[float]:
    use_intended = from_intended and r.t_intended_ns is not None
    return _known(timing.response_ttlt_ms(r) if use_intended else timing.ttlt_ms(r))


_METRICS: dict[str, Callable[[RequestTiming, bool], list[float]]] = {
    "ttft_ms": _ttft,
    "ttlt_ms": _ttlt,
    "tpot_ms": lambda r, _: _known(timing.tpot_ms(r)),
    "itl_ms": lambda r, _: timing.itl_ms(r),
    "queue_ms": lambda r, _: _known(r.queue_ms),
}

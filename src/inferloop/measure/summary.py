"""One bench point's requests condensed to the numbers that tables, verdicts and reports show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from inferloop.core.digest import plain
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.bootstrap import BlockBootstrap, Interval
from inferloop.measure.columns import ABSENT, OK, Columns, Ints
from inferloop.measure.latency import Latency
from inferloop.measure.samples import CENSORED, METRICS, Requests, Samples, collect, concerns_service, is_failure
from inferloop.measure.sessions import session_samples, sessions
from inferloop.measure.steady import SteadyStart, steady_start
from inferloop.measure.stutter import Stutter, stutter
from inferloop.measure.throughput import achieved_interval, achieved_rate
from inferloop.measure.timing import RequestTiming

__all__ = [
    "Latency",
    "Mode",
    "PointSummary",
    "achieved_rate",
    "arrival_rate",
    "count_errors",
    "summarize",
    "token_rate",
]

Mode = Literal["serial", "burst", "open", "closed"]
_RESPONSE = ("ttft_ms", "ttfat_ms", "ttlt_ms")


@dataclass(frozen=True, slots=True)
class PointSummary:
    """One point of a bench run; timing.DEFINITIONS says what each number is. The service latencies count from the send,
    the response latencies from the intended instant; these, the schedule delay and the arrival rate are None in closed
    loops. `session_ms` is None without sessions.

    `achieved_basis` is completions | span | in flight, see measure.throughput.
    """

    mode: Mode
    offered_qps: float | None
    arrival_qps: float | None
    achieved_qps: float | None
    achieved_basis: str
    num_requests: int
    output_tok_s: float | None
    ttft_ms: Latency
    tpot_ms: Latency
    itl_ms: Latency
    ttlt_ms: Latency
    queue_ms: Latency
    response_ttft_ms: Latency | None
    response_ttlt_ms: Latency | None
    schedule_delay_ms: Latency | None
    errors: dict[str, Any]
    num_censored: int
    certified: bool
    in_flight: float | None
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    stutter: Stutter | None
    ttfat_ms: Latency
    response_ttfat_ms: Latency | None
    icl_ms: Latency
    max_gap_ms: Latency
    blocked_ms: Latency
    session_ms: Latency | None
    tokens_per_chunk: float | None
    achieved_interval: Interval | None
    steady: SteadyStart
    steady_ttft_ms: Latency

    def as_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            out[field.name] = value.as_json() if isinstance(value, Latency | Interval) else plain(value)
        return out


def summarize(requests: Sequence[RequestTiming], *, mode: Mode, offered_qps: float | None = None) -> PointSummary:
    """Condense the measured requests of one point. Works on any input: none, all failed, all unfinished."""
    c = Columns.of(requests)
    bootstrap = BlockBootstrap.of(c.send)
    latencies = {m: Latency.of(collect(m, c), bootstrap) for m in METRICS}
    intended = np.flatnonzero(c.intended != ABSENT)
    response: dict[str, Latency | None] = {f"response_{m}": None for m in _RESPONSE}
    delay = None
    if len(intended):
        response = {f"response_{m}": Latency.of(collect(m, c, from_intended=True), bootstrap) for m in _RESPONSE}
        late = (c.send[intended] - c.intended[intended]) / NS_PER_MS
        none = np.zeros(0, np.int64)
        delay = Latency.of(Samples(late, intended, none, np.zeros(0), none, len(late)), bootstrap)
    whole = session_samples(requests)
    steady = steady_start(c)
    ttft = collect("ttft_ms", c)
    qps, basis = achieved_rate(c)
    good = c.status[c.owner] == OK
    return PointSummary(
        mode=mode,
        offered_qps=offered_qps,
        arrival_qps=arrival_rate(c),
        achieved_qps=qps,
        achieved_basis=basis,
        num_requests=len(requests),
        output_tok_s=token_rate(c),
        schedule_delay_ms=delay,
        errors=count_errors(requests),
        num_censored=sum(r.error == CENSORED for r in requests),
        certified=latencies["ttft_ms"].p95 is not None,
        in_flight=_in_flight(c),
        num_input_tokens=sum(r.num_input_tokens for r in requests),
        num_output_tokens=sum(r.num_output_tokens for r in requests),
        num_cached_tokens=sum(r.num_cached_tokens for r in requests),
        stutter=stutter(c),
        session_ms=Latency.of(whole, BlockBootstrap.of([s.start_ns for s in sessions(requests)]))
        if whole.num_total
        else None,
        tokens_per_chunk=float(c.chunk_n[good].mean()) if good.any() else None,
        achieved_interval=achieved_interval(c),
        steady=steady,
        steady_ttft_ms=Latency.of(ttft.owned_by(c.send >= (steady.t_ns or 0)), bootstrap),
        **latencies,
        **response,  # type: ignore[arg-type]
    )


def arrival_rate(requests: Requests) -> float | None:
    """Requests that fell due per second, whether they were sent in time or not; None below two."""
    c = Columns.of(requests)
    due = c.intended[c.intended != ABSENT]
    return _rate(due)


def token_rate(requests: Requests) -> float | None:
    """Output tokens per second of all requests together; None below two token instants."""
    c = Columns.of(requests)
    if not len(c.chunk_t):
        return None
    first, last = int(c.chunk_t.min()), int(c.chunk_t.max())
    later = int(c.chunk_n[c.chunk_t > first].sum())
    return later * NS_PER_S / (last - first) if last > first else None


def _rate(times: Ints) -> float | None:
    span = int(times.max() - times.min()) if len(times) else 0
    return (len(times) - 1) * NS_PER_S / span if span > 0 else None


def count_errors(requests: Sequence[RequestTiming]) -> dict[str, Any]:
    """{rate, by_class}. The rate is of finished requests and of the service's own failures; `by_class` has all."""
    finished = [r for r in requests if concerns_service(r) and r.error != CENSORED]
    by_class = Counter(r.error for r in requests if r.error is not None)
    rate = sum(is_failure(r) for r in finished) / len(finished) if finished else None
    return {"rate": rate, "by_class": dict(sorted(by_class.items()))}


def _in_flight(c: Columns) -> float | None:
    span = int(c.end.max() - c.send.min()) if len(c) else 0
    return int((c.end - c.send).sum()) / span if span > 0 else None

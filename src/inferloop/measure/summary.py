"""One bench point's requests condensed to the numbers that tables, verdicts and reports show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from inferloop.core.digest import plain
from inferloop.core.slo import LATENCY_METRICS
from inferloop.core.units import NS_PER_S
from inferloop.measure.quantiles import min_samples, percentile, quantile
from inferloop.measure.samples import CENSORED, Samples, collect, concerns_service, is_failure
from inferloop.measure.stutter import Stutter, stutter
from inferloop.measure.timing import RequestTiming, schedule_delay_ms

Mode = Literal["serial", "burst", "open"]
_QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
_STEADY_SHARE = 0.5  # completions must span this share of the run for their slope to be a steady rate


@dataclass(frozen=True, slots=True)
class Latency:
    """In ms. `mean` is over successes, so read it beside the error rate; p50, p95 and p99 count failures as +inf and
    are None where not certifiable. `successes` holds the same percentiles over successes alone."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    num_samples: int
    num_more_needed: dict[str, int]
    successes: dict[str, float | None]

    @classmethod
    def of(cls, samples: Samples) -> Latency:
        ordered, seen = samples.adjusted(), sorted(samples.values)
        n = samples.num_requests
        found = {name: percentile(ordered, q, num_independent=n) for name, q in _QUANTILES}
        mean = math.fsum(seen) / len(seen) if seen else None
        return cls(
            mean,
            found["p50"].value,
            found["p95"].value,
            found["p99"].value,
            n,
            {name: p.num_more_needed for name, p in found.items() if p.num_more_needed},
            {name: quantile(seen, q) if seen and n >= min_samples(q) else None for name, q in _QUANTILES},
        )

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: an infinite percentile is null and named in `infinite`."""
        percentiles = {"p50": self.p50, "p95": self.p95, "p99": self.p99}
        infinite = [name for name, value in percentiles.items() if value is not None and math.isinf(value)]
        return {
            "mean": self.mean,
            **{name: None if name in infinite else value for name, value in percentiles.items()},
            "infinite": infinite,
            "num_samples": self.num_samples,
            "num_more_needed": self.num_more_needed,
            "successes": self.successes,
        }


@dataclass(frozen=True, slots=True)
class PointSummary:
    """One point of a bench run. The response latencies, the schedule delay and the arrival rate are None in closed
    loops.

    arrival_qps     (requests - 1) / (last - first intended instant): the rate that the arrivals as drawn amount to; in
                    a short window it differs from the offered one by chance
    achieved_qps    (completions - 1) / (last - first completion) when completions span most of the run, so that neither
                    the filling nor the draining of the pipeline counts; else completions / whole span, a lower bound.
                    `achieved_basis` says which: completions | span
    output_tok_s    tokens after the first token instant / (last - first token instant)
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

    def as_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            out[field.name] = value.as_json() if isinstance(value, Latency) else plain(value)
        return out


def summarize(requests: Sequence[RequestTiming], *, mode: Mode, offered_qps: float | None = None) -> PointSummary:
    """Condense the measured requests of one point. Works on any input: none, all failed, all unfinished."""
    is_open = any(r.t_intended_ns is not None for r in requests)
    latencies = {m: Latency.of(collect(m, requests)) for m in LATENCY_METRICS}
    response = {
        m: Latency.of(collect(m, requests, from_intended=True)) if is_open else None for m in ("ttft_ms", "ttlt_ms")
    }
    delays = [d for r in requests if (d := schedule_delay_ms(r)) is not None]
    qps, basis = achieved_rate(requests)
    ttft = latencies["ttft_ms"]
    return PointSummary(
        mode=mode,
        offered_qps=offered_qps,
        arrival_qps=arrival_rate(requests),
        achieved_qps=qps,
        achieved_basis=basis,
        num_requests=len(requests),
        output_tok_s=token_rate(requests),
        response_ttft_ms=response["ttft_ms"],
        response_ttlt_ms=response["ttlt_ms"],
        schedule_delay_ms=Latency.of(Samples(tuple(delays), 0, (), len(delays))) if delays else None,
        errors=count_errors(requests),
        num_censored=sum(r.error == CENSORED for r in requests),
        certified=ttft.p95 is not None,
        in_flight=_in_flight(requests),
        num_input_tokens=sum(r.num_input_tokens for r in requests),
        num_output_tokens=sum(r.num_output_tokens for r in requests),
        num_cached_tokens=sum(r.num_cached_tokens for r in requests),
        stutter=stutter(requests),
        **latencies,
    )


def arrival_rate(requests: Sequence[RequestTiming]) -> float | None:
    """Requests that fell due per second, whether they were sent in time or not; None below two."""
    due = sorted(r.t_intended_ns for r in requests if r.t_intended_ns is not None)
    return (len(due) - 1) * NS_PER_S / (due[-1] - due[0]) if due and due[-1] > due[0] else None


def achieved_rate(requests: Sequence[RequestTiming]) -> tuple[float | None, str]:
    """(successful completions per second, "completions" | "span"); None when nothing completed."""
    done = sorted(r.t_end_ns for r in requests if r.ok)
    if not done:
        return None, "completions"
    span = done[-1] - min(r.t_send_ns for r in requests)
    slope_ns = done[-1] - done[0]
    if len(done) > 1 and span > 0 and slope_ns >= _STEADY_SHARE * span:
        return (len(done) - 1) * NS_PER_S / slope_ns, "completions"
    return (len(done) * NS_PER_S / span if span > 0 else None), "span"


def token_rate(requests: Sequence[RequestTiming]) -> float | None:
    """Output tokens per second of all requests together; None below two token instants."""
    chunks = [c for r in requests for c in r.chunks]
    if not chunks:
        return None
    first, last = min(c.t_ns for c in chunks), max(c.t_ns for c in chunks)
    later = sum(c.num_tokens for c in chunks if c.t_ns > first)
    return later * NS_PER_S / (last - first) if last > first else None


def count_errors(requests: Sequence[RequestTiming]) -> dict[str, Any]:
    """{rate, by_class}. The rate is of finished requests and of the service's own failures; `by_class` has all."""
    finished = [r for r in requests if concerns_service(r) and r.error != CENSORED]
    by_class = Counter(r.error for r in requests if r.error is not None)
    rate = sum(is_failure(r) for r in finished) / len(finished) if finished else None
    return {"rate": rate, "by_class": dict(sorted(by_class.items()))}


def _in_flight(requests: Sequence[RequestTiming]) -> float | None:
    if not requests:
        return None
    span = max(r.t_end_ns for r in requests) - min(r.t_send_ns for r in requests)
    return sum(r.t_end_ns - r.t_send_ns for r in requests) / span if span > 0 else None

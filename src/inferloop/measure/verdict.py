"""Whether a set of requests keeps a service level objective: pass | fail | inconclusive | not declared.

The burden of proof lies on "pass". With k of n requests over the limit and failures counting as over:
    fail          the observed quantile exceeds the limit (enough samples), or so many are over that a service which
                  kept the objective would show them in less than 1 % of the runs
    pass          enough samples, and a service that broke the objective would show so few in less than 1 % of the runs
    inconclusive  anything else; the reason says what is missing
TTFT, TTFAT and TTLT count from the instant a request should have been sent, and `network_ms` of the contract is taken
off these.
A run is far shorter than the window of an error budget, so an error rate passes as observed, and the reason says how
large a rate the run could have missed. It fails when a service that kept its limit would show so many errors in less
than 1 % of the runs: one hiccup among a dozen requests decides nothing.

All objectives hold together or the whole fails. A pass needs every one of them to pass, so each may be tested at the
full 1 % (intersection-union test, Berger 1982); a fail needs only one, so the 1 % are shared out among them
(Bonferroni). Both take requests for independent; `margin` has the interval that does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from inferloop.core.digest import plain
from inferloop.core.slo import Objective, Slo
from inferloop.core.units import NS_PER_S
from inferloop.measure.balance import Balance
from inferloop.measure.bootstrap import BlockBootstrap, Interval
from inferloop.measure.columns import ABSENT, NOT_OURS, OK, Bools, Columns
from inferloop.measure.latency import INTERVAL_CONFIDENCE
from inferloop.measure.quantiles import CONFIDENCE, binomial_cdf, min_samples, quantile
from inferloop.measure.samples import CENSORED, Requests, Samples, collect, concerns_service, is_failure
from inferloop.measure.timing import RequestTiming

Verdict = Literal["pass", "fail", "inconclusive", "not declared"]
_KEEPS_UP: dict[str, Verdict] = {"saturated": "fail", "sustained": "pass", "undecided": "inconclusive"}
_FROM_USER = ("ttft_ms", "ttfat_ms", "ttlt_ms")


@dataclass(frozen=True, slots=True)
class ObjectiveVerdict:
    """One objective. `limit` has the network taken off; `observed` is None without samples and may be +inf.

    `margin` is (limit - observed) / limit: positive when kept, -inf when the observed quantile is infinite.
    """

    objective: Objective
    verdict: Verdict
    limit: float
    observed: float | None
    num_samples: int
    num_over: int
    reason: str

    @property
    def margin(self) -> float | None:
        if self.observed is None:
            return None
        return (self.limit - self.observed) / self.limit if self.limit > 0 else -math.inf


@dataclass(frozen=True, slots=True)
class ErrorVerdict:
    """The error rate. Unfinished requests at the cut-off are neither failures nor successes."""

    verdict: Verdict
    limit: float | None
    rate: float | None
    num_failed: int
    num_requests: int
    reason: str


@dataclass(frozen=True, slots=True)
class SloVerdict:
    """The joint verdict over everything declared, and its parts."""

    verdict: Verdict
    objectives: tuple[ObjectiveVerdict, ...]
    errors: ErrorVerdict
    goodput: float | None
    """Share of all offered requests that succeeded and kept every latency limit; None without requests."""
    goodput_qps: float | None = None
    """The same per second of offered load; None below two requests."""
    goodput_interval: Interval | None = None
    """Of the share."""
    balance: Balance | None = None
    """Arrivals against completions; None where the load does not set the rate."""

    def of_load(self, balance: Balance | None) -> SloVerdict:
        """What it is worth as a verdict about the load that was offered: a service that completes less keeps its
        objectives only until its queue has grown, so a saturated level fails, and one passes only that certainly is
        not. Without objectives there is nothing to fail."""
        if balance is None or self.verdict == "not declared":
            return replace(self, balance=balance)
        return replace(self, verdict=joint([self.verdict, _KEEPS_UP[balance.verdict]]), balance=balance)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What failed or could not be decided, in words."""
        parts = [(o.verdict, o.reason) for o in self.objectives] + [(self.errors.verdict, self.errors.reason)]
        if self.balance is not None:
            parts.append((_KEEPS_UP[self.balance.verdict], self.balance.reason))
        return tuple(reason for verdict, reason in parts if verdict in ("fail", "inconclusive"))

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: an infinite `observed` is null and `infinite` is true. `reasons` come along."""
        objectives = [
            {
                **plain(o),
                "observed": _finite(o.observed),
                "infinite": o.observed == math.inf,
                "margin": _finite(o.margin),
            }
            for o in self.objectives
        ]
        return {
            "verdict": self.verdict,
            "objectives": objectives,
            "errors": plain(self.errors),
            "goodput": self.goodput,
            "goodput_qps": self.goodput_qps,
            "goodput_interval": self.goodput_interval.as_json() if self.goodput_interval else None,
            "reasons": list(self.reasons),
        }

    @property
    def margin(self) -> float | None:
        """The smallest margin of the latency objectives; None when there is none to take."""
        margins = [o.margin for o in self.objectives if o.margin is not None]
        return min(margins) if margins else None


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def judge(slo: Slo, requests: Iterable[RequestTiming]) -> SloVerdict:
    """The verdict over the requests in the objective's scope."""
    inside = in_scope(slo, requests)
    c = Columns.of(inside)
    num_tests = len(slo.objectives) + (slo.max_error_rate is not None)
    objectives = tuple(judge_objective(o, c, network_ms=slo.network_ms, num_tests=num_tests) for o in slo.objectives)
    errors = judge_errors(slo.max_error_rate, inside, num_tests=num_tests)
    verdict = joint([*(o.verdict for o in objectives), errors.verdict])
    return SloVerdict(verdict, objectives, errors, *_goodput(slo, c))


def hopeless(slo: Slo, requests: Iterable[RequestTiming], *, confidence: float = 0.9999) -> bool:
    """Whether more requests would not save a latency objective: so many are over its limit already that a service
    which kept it would show them in less than one run of ten thousand. Strict, because it is asked again and again."""
    c = Columns.of(in_scope(slo, requests))
    for objective in slo.objectives:
        samples = collect(objective.metric, c, from_intended=True)
        over, _ = samples.num_over(effective_limit(objective, slo.network_ms))
        if not over:
            continue
        n = samples.num_requests
        over_n = math.floor(over * n / samples.num_total + 1e-9)
        if 1.0 - binomial_cdf(over_n - 1, n, 1.0 - objective.quantile) <= 1.0 - confidence:
            return True
    return False


def in_scope(slo: Slo, requests: Iterable[RequestTiming]) -> list[RequestTiming]:
    """Those that the objectives are about."""
    return [r for r in requests if not slo.scope or r.traffic_class in slo.scope]


def joint(verdicts: Iterable[Verdict]) -> Verdict:
    """Any fail fails; else any doubt is doubt; pass needs at least one declared gate that passed."""
    declared = [v for v in verdicts if v != "not declared"]
    if not declared:
        return "not declared"
    if "fail" in declared:
        return "fail"
    return "inconclusive" if "inconclusive" in declared else "pass"


def effective_limit(objective: Objective, network_ms: float) -> float:
    """The limit that is left for the service."""
    return objective.limit - network_ms if objective.metric in _FROM_USER else objective.limit


def judge_objective(
    objective: Objective, requests: Requests, *, network_ms: float = 0.0, num_tests: int = 1
) -> ObjectiveVerdict:
    """One latency objective over these requests; `num_tests` objectives share the risk of a wrong fail."""
    limit = effective_limit(objective, network_ms)
    samples = collect(objective.metric, requests, from_intended=True)
    if not samples.num_total:
        told = "the server does not tell it" if objective.metric == "queue_ms" else "no request has a value for it"
        return ObjectiveVerdict(objective, "inconclusive", limit, None, 0, 0, f"{objective.label}: {told}")
    observed = quantile(samples.adjusted(), objective.quantile)
    certain, possible = samples.num_over(limit)
    # Token gaps of one request are correlated: the requests are the independent observations, so counts are scaled.
    n = samples.num_requests
    certain_n = math.floor(certain * n / samples.num_total + 1e-9)
    possible_n = math.ceil(possible * n / samples.num_total - 1e-9)
    verdict, why = _decide(objective.quantile, n, certain_n, possible_n, samples, limit, num_tests)
    seen = "infinite" if math.isinf(observed) else f"{observed:.4g} ms" if observed < 1e4 else f"{observed:.0f} ms"
    text = f"{objective.label}: observed {seen} over {n} requests, {certain} of {samples.num_total} samples over"
    if limit != objective.limit:
        text += f" the {limit:g} ms left after the network"
    return ObjectiveVerdict(objective, verdict, limit, observed, n, certain, f"{text}; {why}" if why else text)


def _decide(
    q: float, n: int, certain: int, possible: int, samples: Samples, limit: float, num_tests: int
) -> tuple[Verdict, str]:
    tail = 1.0 - q
    enough = n >= min_samples(q)
    if certain and 1.0 - binomial_cdf(certain - 1, n, tail) <= (1.0 - CONFIDENCE) / num_tests:
        return "fail", ""
    if enough and quantile(np.sort(samples.optimistic()[0]), q) > limit:
        return "fail", ""
    if not enough:
        return "inconclusive", f"p{q * 100:g} needs {min_samples(q) - n} more requests"
    if binomial_cdf(possible, n, tail) <= 1.0 - CONFIDENCE:
        return "pass", ""
    return "inconclusive", f"within the limit, but too close to it to be certain with {n} requests"


def judge_errors(limit: float | None, requests: Sequence[RequestTiming], *, num_tests: int = 1) -> ErrorVerdict:
    """The share of finished requests that failed, against the limit."""
    finished = [r for r in requests if concerns_service(r) and r.error != CENSORED]
    num_failed = sum(is_failure(r) for r in finished)
    n = len(finished)
    rate = num_failed / n if n else None
    if limit is None:
        return ErrorVerdict("not declared", None, rate, num_failed, n, "error rate: not declared")
    if rate is None:
        return ErrorVerdict("inconclusive", limit, None, 0, 0, "error rate: no request finished")
    text = f"error rate {rate:.4g} ({num_failed} of {n}), limit {limit:g}"
    if rate > limit:
        if 1.0 - binomial_cdf(num_failed - 1, n, limit) <= (1.0 - CONFIDENCE) / num_tests:
            return ErrorVerdict("fail", limit, rate, num_failed, n, text)
        return ErrorVerdict("inconclusive", limit, rate, num_failed, n, f"{text}; too few requests to be certain")
    missed = 1.0 - (1.0 - CONFIDENCE) ** (1.0 / n) if num_failed == 0 else None
    if missed is not None and missed > limit:
        text += f"; {n} requests without an error cannot rule out a rate of {missed:.2g}"
    return ErrorVerdict("pass", limit, rate, num_failed, n, text)


def _goodput(slo: Slo, c: Columns) -> tuple[float | None, float | None, Interval | None]:
    """(share of what was offered, the same per second, the share's interval)."""
    offered = np.flatnonzero(c.status != NOT_OURS)
    if not len(offered):
        return None, None, None
    good = keeps(slo, c)[offered]
    share = float(np.mean(good))
    due = c.intended[offered]
    if (due != ABSENT).all():
        span_ns, num = int(due.max() - due.min()), len(due) - 1
    else:
        span_ns, num = int(c.end[offered].max() - c.send[offered].min()), len(offered)
    qps = share * num * NS_PER_S / span_ns if span_ns > 0 else None
    bootstrap = BlockBootstrap.of(c.start(from_intended=True)[offered])
    if bootstrap is None:
        return share, qps, None
    replicates = bootstrap.ratio(good.astype(np.float64), np.ones(len(good)))
    return share, qps, bootstrap.interval(replicates, INTERVAL_CONFIDENCE)


def keeps(slo: Slo, c: Columns) -> Bools:
    """Per request, whether it succeeded and kept every latency limit; its own quantile where it has several values."""
    good: Bools = c.status == OK
    for objective in slo.objectives:
        samples = collect(objective.metric, c, from_intended=True)
        over = samples.values > effective_limit(objective, slo.network_ms)
        num, num_over = np.bincount(samples.owners, minlength=len(c)), np.bincount(samples.owners, over, len(c))
        good &= num - num_over >= objective.quantile * num - 1e-9
    return good

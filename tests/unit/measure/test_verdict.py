"""Verdicts: the burden of proof is on pass, failures count as infinite, nothing undeclared passes."""

from __future__ import annotations

import json
import math

import pytest

from inferloop.core.slo import Objective, Slo
from inferloop.core.units import NS_PER_MS
from inferloop.measure.summary import summarize
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.measure.verdict import hopeless, joint, judge

TTFT = Objective("ttft_ms", 0.95, 450.0)


def request(ttft: float, *, error: str | None = None, end: float | None = None, cls: str = "default") -> RequestTiming:
    """Times in ms from 0; `ttft` inf means no token came."""
    chunks = () if math.isinf(ttft) else (Chunk(int(ttft * NS_PER_MS), 1), Chunk(int((ttft + 80) * NS_PER_MS), 4))
    t_end = end if end is not None else ttft + 80
    return RequestTiming("r", 0, 0, 0, int(t_end * NS_PER_MS), chunks, 10, 5, error=error, traffic_class=cls)


def test_pass_needs_enough_requests() -> None:
    slo = Slo((TTFT,))
    few = judge(slo, [request(100)] * 129)
    assert few.verdict == "inconclusive"
    assert "needs 1 more" in few.reasons[0]
    assert judge(slo, [request(100)] * 130).verdict == "pass"


def test_close_to_the_limit_is_doubt_and_over_it_is_failure() -> None:
    slo = Slo((TTFT,))
    assert judge(slo, [request(100)] * 129 + [request(500)]).verdict == "pass"
    assert judge(slo, [request(100)] * 125 + [request(500)] * 5).verdict == "inconclusive"
    assert judge(slo, [request(100)] * 120 + [request(500)] * 10).verdict == "fail"


def test_hopeless_is_certain_early() -> None:
    assert judge(Slo((TTFT,)), [request(900)] * 3).verdict == "fail"
    assert judge(Slo((TTFT,)), [request(900)] * 1).verdict == "inconclusive"


def test_hopeless_is_stricter_than_failed() -> None:
    slo = Slo((TTFT,))
    assert judge(slo, [request(100)] * 5 + [request(900)] * 3).verdict == "fail"
    assert not hopeless(slo, [request(100)] * 5 + [request(900)] * 3)
    assert hopeless(slo, [request(100)] * 2 + [request(900)] * 6)
    assert not hopeless(slo, [request(100)] * 500)
    assert not hopeless(Slo(), [request(900)] * 500)


def test_undeclared_is_never_passed() -> None:
    nothing = judge(Slo(), [request(100)] * 500)
    assert nothing.verdict == "not declared"
    assert nothing.errors.verdict == "not declared"
    assert joint([]) == "not declared"
    assert joint(["not declared", "pass"]) == "pass"
    assert joint(["inconclusive", "fail", "pass"]) == "fail"


def test_network_is_taken_off_what_the_user_sees_and_nothing_else() -> None:
    tpot = Objective("tpot_ms", 0.95, 25.0)
    slo = Slo((TTFT, tpot), network_ms=40.0)
    verdict = judge(slo, [request(430)] * 200)
    ttft_part, tpot_part = verdict.objectives
    assert (ttft_part.limit, ttft_part.verdict) == (410.0, "fail")
    assert (tpot_part.limit, tpot_part.verdict, tpot_part.observed) == (25.0, "pass", 20.0)


def test_failures_never_leave_the_percentiles() -> None:
    requests = [request(10_000, end=10_080)] * 6 + [request(math.inf, error="timeout", end=60_000)] * 250
    verdict = judge(Slo((Objective("ttft_ms", 0.95, 60_000.0),), max_error_rate=0.001), requests)
    assert verdict.verdict == "fail"
    assert verdict.objectives[0].observed == math.inf
    assert verdict.goodput == 6 / 256
    told = json.loads(json.dumps(verdict.as_json(), allow_nan=False))
    assert told["objectives"][0]["observed"] is None
    assert told["objectives"][0]["infinite"] is True
    assert told["verdict"] == "fail"
    assert len(told["reasons"]) == 2
    assert verdict.errors.rate == 250 / 256
    summary = summarize(requests, mode="burst").as_json()
    assert summary["ttft_ms"]["p95"] is None
    assert summary["ttft_ms"]["infinite"] == ["p50", "p90", "p95"]
    assert summary["ttft_ms"]["mean"] == 10_000.0
    assert summary["errors"] == {"rate": 250 / 256, "by_class": {"timeout": 250}}


def test_a_failed_answer_weighs_as_much_as_a_whole_one_among_token_gaps() -> None:
    """Else one request in ten could fail and hardly a gap in a hundred would show it."""
    good = RequestTiming("r", 0, 0, 0, NS_PER_MS, tuple(Chunk(i * 10 * NS_PER_MS, 1) for i in range(31)), 10, 31)
    requests = [good] * 180 + [request(math.inf, error="http_5xx", end=5.0)] * 20
    verdict = judge(Slo((Objective("itl_ms", 0.95, 25.0),)), requests)
    assert (verdict.verdict, verdict.objectives[0].observed) == ("fail", math.inf)
    assert judge(Slo((Objective("itl_ms", 0.85, 25.0),)), requests).objectives[0].observed == 10.0
    itl = summarize(requests, mode="open").itl_ms
    assert (itl.p50, itl.p95, itl.num_samples) == (10.0, math.inf, 200)
    unfinished = [good] * 180 + [request(math.inf, error="censored", end=5.0)] * 20
    assert judge(Slo((Objective("itl_ms", 0.95, 25.0),)), unfinished).verdict == "inconclusive"


def test_a_run_where_everything_fails_is_a_failure_not_a_crash() -> None:
    requests = [request(math.inf, error="timeout", end=60_000)] * 256
    verdict = judge(Slo((TTFT,), max_error_rate=0.01), requests)
    assert (verdict.verdict, verdict.goodput) == ("fail", 0.0)
    summary = summarize(requests, mode="open", offered_qps=5.0).as_json()
    assert summary["ttft_ms"]["mean"] is None
    assert summary["achieved_qps"] is None
    assert summary["output_tok_s"] is None


def test_unfinished_requests_are_censored_and_counted() -> None:
    cut = request(math.inf, error="censored", end=200.0)
    requests = [request(100)] * 246 + [cut] * 10
    verdict = judge(Slo((TTFT,), max_error_rate=0.0), requests)
    assert verdict.objectives[0].verdict == "inconclusive"  # they may yet be over the limit, or not
    assert verdict.errors.num_requests == 246
    assert verdict.errors.verdict == "pass"
    assert verdict.goodput == 246 / 256
    assert summarize(requests, mode="open").num_censored == 10
    late = request(math.inf, error="censored", end=5_000.0)
    assert judge(Slo((TTFT,)), [request(100)] * 230 + [late] * 26).verdict == "fail"


def test_callers_mistakes_and_our_own_are_not_the_service() -> None:
    requests = [request(100)] * 200 + [request(math.inf, error=e, end=1.0) for e in ("http_4xx", "client")] * 50
    verdict = judge(Slo((TTFT,), max_error_rate=0.0), requests)
    assert (verdict.verdict, verdict.goodput) == ("pass", 1.0)
    assert summarize(requests, mode="burst").errors == {"rate": 0.0, "by_class": {"client": 50, "http_4xx": 50}}


def test_scope_limits_the_verdict_to_its_classes() -> None:
    requests = [request(100)] * 200 + [request(9_000, cls="batch")] * 200
    assert judge(Slo((TTFT,), scope=("default",)), requests).verdict == "pass"
    assert judge(Slo((TTFT,)), requests).verdict == "fail"


def test_what_the_server_does_not_tell_is_not_passed() -> None:
    verdict = judge(Slo((Objective("queue_ms", 0.95, 100.0),)), [request(100)] * 200)
    assert verdict.verdict == "inconclusive"
    assert "does not tell" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("num_failed", "num_requests", "limit", "verdict"),
    [
        (1, 12, 0.01, "inconclusive"),  # a service at its limit shows this in 11 % of the runs
        (3, 12, 0.01, "fail"),
        (1, 143, 0.01, "pass"),
        (2, 143, 0.01, "inconclusive"),
        (7, 143, 0.01, "fail"),
        (1, 12, 0.0, "fail"),  # none was promised
    ],
)
def test_an_error_rate_fails_only_when_that_is_certain(
    num_failed: int, num_requests: int, limit: float, verdict: str
) -> None:
    requests = [request(100)] * (num_requests - num_failed) + [
        request(math.inf, error="http_5xx", end=1.0)
    ] * num_failed
    assert judge(Slo((), max_error_rate=limit), requests).errors.verdict == verdict

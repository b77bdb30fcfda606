"""What each gate makes of what was found, and all of them together."""

from __future__ import annotations

import pytest

from inferloop.backends.conformance import CheckResult
from inferloop.cli import gates
from inferloop.cli.gates import Gate
from inferloop.contract.load import parse
from inferloop.contract.workload import Contract
from inferloop.fleet.decide.fit import FitDecision
from inferloop.measure.frontier import Capacity, Frontier, FrontierPoint
from inferloop.measure.verdict import Verdict
from inferloop.plan.capacity import size

MEASURED = Capacity(4.0, 4.0, 6.0, "measured", True, "highest rate that passes")


def point(qps: float, verdict: Verdict) -> FrontierPoint:
    return FrontierPoint(qps, qps, None, verdict, None)


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (["pass", "not declared"], "pass"),
        (["pass", "inconclusive"], "inconclusive"),
        (["pass", "inconclusive", "fail"], "fail"),
        (["fail", "void"], "void"),
        (["not declared"], "not declared"),
        (["pass", "a word of a later version"], "inconclusive"),
    ],
)
def test_the_whole_is_as_good_as_its_worst_declared_gate(verdicts: list[str], whole: str) -> None:
    assert gates.overall([Gate(f"g{i}", verdict, "") for i, verdict in enumerate(verdicts)]) == whole


def test_reasons_name_only_what_keeps_it_from_passing() -> None:
    found = [Gate("a", "pass", "good"), Gate("b", "not declared", "none"), Gate("c", "fail", "too slow")]
    assert gates.reasons(found) == ["c: too slow"]


def test_one_failed_protocol_check_fails_the_gate_and_a_refusal_does_not() -> None:
    refused = CheckResult("tools", "refused", "not supported")
    assert gates.protocol_gate([CheckResult("chat", "passed"), refused]).verdict == "pass"
    broken = gates.protocol_gate([CheckResult("stop", "failed", "leaked"), refused])
    assert (broken.verdict, broken.reason) == ("fail", "stop: leaked")


def test_a_peak_that_one_replica_keeps_needs_no_further_argument() -> None:
    assert gates.objective_gate("pass", (), Frontier.of([]), 2.0).verdict == "pass"


def test_no_objective_is_said_so() -> None:
    gate = gates.objective_gate("not declared", (), Frontier.of([]), 2.0)
    assert (gate.verdict, gate.reason) == ("not declared", "the contract declares no objective")


def test_several_replicas_are_judged_at_the_share_that_each_gets() -> None:
    frontier = Frontier.of([point(2.0, "pass"), point(4.0, "pass"), point(9.0, "fail")])
    kept = gates.objective_gate("fail", ("slow",), frontier, 3.0)
    assert (kept.verdict, "at the whole peak it was fail" in kept.reason) == ("pass", True)
    assert gates.objective_gate("fail", ("slow",), frontier, 4.5).verdict == "fail"


def test_a_pass_above_a_failing_rate_proves_no_share() -> None:
    """The peak itself failed on this one replica; that a higher rate once passed is noise."""
    frontier = Frontier.of([point(1.0, "pass"), point(2.0, "fail"), point(2.6, "pass")])
    assert gates.objective_gate("fail", ("slow",), frontier, 2.0).verdict == "fail"
    assert gates.objective_gate("fail", ("slow",), frontier, 1.0).verdict == "pass"


def test_a_void_peak_stays_void_whatever_the_frontier_says() -> None:
    assert gates.objective_gate("void", ("late",), Frontier.of([point(9.0, "pass")]), 1.0).verdict == "void"


def test_a_missing_spare_is_said_and_fails_nothing() -> None:
    sizing = size(2.0, MEASURED, rho=0.7, failure_headroom=1)
    gate = gates.fleet_gate(sizing, FitDecision(1, 1, ("cores: 4 needed, 2 here",)))
    assert gate.verdict == "pass"
    assert "1 spare missing (cores: 4 needed, 2 here)" in gate.reason


def test_a_missing_carrier_fails() -> None:
    sizing = size(10.0, MEASURED, rho=0.7, failure_headroom=1)
    assert sizing.needed == 5
    gate = gates.fleet_gate(sizing, FitDecision(1, 4, ("memory",)))
    assert (gate.verdict, gate.reason) == ("fail", "3 of 4 replicas that carry the peak are missing: memory")


def test_a_capacity_of_nothing_fails() -> None:
    sizing = size(1.0, Capacity(0.0, 0.0, 1.0, "none", True, "no measured rate passes"))
    assert gates.fleet_gate(sizing, FitDecision(0, 0, ())).verdict == "fail"


def test_a_fleet_that_cannot_be_sized_is_an_open_question() -> None:
    sizing = size(1.0, Capacity(0.0, 0.0, 4.0, "undecided", True, "no rate could be certified"))
    assert gates.fleet_gate(sizing, FitDecision(0, 0, ())).verdict == "inconclusive"


def test_cost_is_never_passed_silently(minimal: Contract, capped: Contract) -> None:
    assert gates.cost_gate(minimal).verdict == "not declared"
    assert gates.cost_gate(capped).verdict == "inconclusive"


def test_quality_without_a_suite_is_not_declared(minimal: Contract) -> None:
    assert gates.quality_gate(minimal, None).verdict == "not declared"


_TEXT = """
version: 1
service: s
archetype: chat
model: {id: smollm2-135m-instruct}
traffic: {qps: {avg: 1, p95: 1, peak: 1}, input_tokens: 30, output_tokens: 4, prefix_reuse: 0}
slo: {ttft_ms: {p95: 1000}}
"""


@pytest.fixture
def minimal() -> Contract:
    return parse(_TEXT)


@pytest.fixture
def capped() -> Contract:
    return parse(_TEXT + "cost: {usd_per_hour: 1.0}\n")

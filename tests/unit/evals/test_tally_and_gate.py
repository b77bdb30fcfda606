"""Denominators, intervals and the gate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.contract.workload import QualityGate
from inferloop.evals.gate import judge
from inferloop.evals.scorer import Score
from inferloop.evals.tally import Tally, minimum_detectable_effect, wilson

RIGHT, WRONG = Score("scored", 1.0), Score("scored", 0.0, "w")
ERRORED, SKIPPED, UNPARSED = Score("errored", None, "e"), Score("skipped", None, "s"), Score("unparsed", None, "u")


def test_errors_stay_in_the_denominator() -> None:
    """4 right, 1 wrong, 5 that raise: 4/5 of the scored, between 4/10 and 9/10 of all, and never a pass."""
    tally = Tally.of([RIGHT] * 4 + [WRONG] + [ERRORED] * 5)
    assert tally.counts == {
        "total": 10,
        "scored": 5,
        "errored": 5,
        "unparsed": 0,
        "judge_failed": 0,
        "skipped": 0,
    }
    assert tally.score == 0.8 and (tally.worst, tally.best) == (0.4, 0.9)
    for minimum in (0.0, 0.4, 0.7, 0.8, 0.9):
        assert judge(QualityGate("s", minimum), tally).verdict == "inconclusive"
    assert judge(QualityGate("s", 0.95), tally).verdict == "fail"


@given(st.lists(st.sampled_from([RIGHT, WRONG, ERRORED, SKIPPED, UNPARSED, Score("judge_failed")]), max_size=60))
def test_the_parts_sum_to_the_whole_and_the_bounds_enclose(scores: list[Score]) -> None:
    tally = Tally.of(scores)
    counts = tally.counts
    assert counts.pop("total") == sum(counts.values()) == len(scores)
    assert 0.0 <= tally.worst <= tally.best <= 1.0
    if tally.scored:
        assert tally.score is not None
        assert tally.worst - 1e-12 <= tally.score <= tally.best + 1e-12
        low, high = tally.interval
        assert low <= tally.score <= high
    else:
        assert tally.score is None and tally.interval == (0.0, 1.0) and tally.mde is None


def test_wilson_against_published_values() -> None:
    """Newcombe 1998 (Statistics in Medicine 17, table I, method 3): 81/263 and 0/20."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(29, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)


def test_a_perfect_run_does_not_claim_to_detect_everything() -> None:
    found = minimum_detectable_effect(24, 24)
    assert found is not None
    p = 26 / 28
    assert found == pytest.approx((1.644854 + 0.841621) * math.sqrt(p * (1 - p) / 24), rel=1e-5)
    bigger = minimum_detectable_effect(2400, 2400)
    assert bigger is not None and bigger < found / 10


def test_the_gate_passes_fails_and_refuses_to_say() -> None:
    gate = QualityGate("s", minimum=0.9)
    assert judge(gate, Tally.of([RIGHT] * 24)).verdict == "pass"
    assert judge(gate, Tally.of([RIGHT] * 9 + [WRONG])).verdict == "pass"
    assert judge(gate, Tally.of([RIGHT] * 8 + [WRONG] * 2)).verdict == "fail"
    assert judge(gate, Tally.of([RIGHT] * 39 + [ERRORED])).verdict == "pass", "2.5 % unscored cannot change it"
    assert judge(gate, Tally.of([RIGHT] * 37 + [SKIPPED] * 3)).verdict == "inconclusive", "7.5 % unscored"
    assert judge(gate, Tally.of([RIGHT] * 35 + [WRONG] * 4 + [ERRORED])).verdict == "inconclusive"
    assert judge(gate, Tally.of([ERRORED] * 10)).verdict == "inconclusive"
    assert judge(gate, Tally.of([])).verdict == "inconclusive"


def test_a_loss_that_was_not_measured_is_said_not_passed_over() -> None:
    verdict = judge(QualityGate("s", 0.9, allowed_loss=0.01), Tally.of([RIGHT] * 30))
    assert verdict.verdict == "pass" and "not checked" in verdict.reasons[-1]

from __future__ import annotations

import pytest

from inferloop.core.clock import VirtualClock
from inferloop.core.units import NS_PER_S
from inferloop.fleet.decide.retry import AttemptOutcome, BudgetConfig, RetryBudget, is_replica_fault, may_retry


@pytest.mark.parametrize("status", [200, 400, 401, 404, 408, 413, 422, 429, 499, 501])
def test_no_answer_about_the_request_itself_is_a_fault_or_retried(status: int) -> None:
    assert not is_replica_fault(AttemptOutcome(status))
    assert not may_retry(AttemptOutcome(status))


@pytest.mark.parametrize("outcome", [AttemptOutcome(s) for s in (500, 502, 503, 504)])
def test_5xx_before_the_body_may_be_retried(outcome: AttemptOutcome) -> None:
    assert is_replica_fault(outcome) and may_retry(outcome)


@pytest.mark.parametrize(("error", "retried"), [("connect", True), ("truncated", True), ("timeout", False)])
def test_broken_connections_are_faults_but_a_timeout_is_not_retried(error: str, retried: bool) -> None:
    assert is_replica_fault(AttemptOutcome(error=error))
    assert may_retry(AttemptOutcome(error=error)) is retried


@pytest.mark.parametrize("outcome", [AttemptOutcome(500, None, True), AttemptOutcome(200, "truncated", True)])
def test_nothing_is_retried_once_the_answer_began(outcome: AttemptOutcome) -> None:
    assert not may_retry(outcome)


def test_the_budget_is_a_share_of_requests_with_a_floor_over_time() -> None:
    clock = VirtualClock()
    budget = RetryBudget(BudgetConfig(ratio=0.1, floor_per_s=0.5, burst=3), clock)
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    for _ in range(11):
        budget.deposit()
    assert [budget.take(), budget.take()] == [True, False]
    clock.advance(2 * NS_PER_S)
    assert [budget.take(), budget.take()] == [True, False]
    clock.advance(3600 * NS_PER_S)
    assert [budget.take() for _ in range(4)] == [True, True, True, False], "no more than the burst is saved up"

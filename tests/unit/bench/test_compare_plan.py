"""Which rates a comparison takes, how long its windows are, and what a budget does to them."""

from __future__ import annotations

import pytest

from inferloop.bench.compare_plan import LEAST_REQUESTS, choose_rates, drain_s, plan_windows
from inferloop.core.errors import UsageError
from inferloop.core.slo import Objective, Slo
from inferloop.measure.quantiles import min_samples


def test_every_target_gets_a_rate_that_keeps_it_busy() -> None:
    rates = choose_rates(2.0, {"A": 40.0, "B": 3.0, "C": 20.0})
    assert rates[0] == 2.0 and len(rates) == 3, "70 % of B is next to the peak, and says the same"
    assert rates[1] == pytest.approx(14, rel=0.03) and rates[2] == pytest.approx(28, rel=0.03)


def test_targets_that_are_alike_share_a_rate() -> None:
    assert len(choose_rates(2.0, {"A": 40.0, "B": 41.0, "C": 44.0})) == 2
    many = choose_rates(1.0, {str(i): 1.5**i for i in range(3, 15)})
    assert 1.0 in many and len(many) <= 3 and list(many) == sorted(many)


def test_windows_certify_a_p95_where_there_is_time() -> None:
    plan = plan_windows((2.0, 20.0), 6, {2.0: 6.0, 20.0: 30.0})
    for rate, window_s in plan.windows_s.items():
        assert plan.num_rounds * window_s * rate >= min_samples(0.95)
    assert plan.expected_s == pytest.approx(plan.num_rounds * (6 * sum(plan.windows_s.values()) + 36))
    assert plan.notes == ()


@pytest.mark.parametrize("left_s", [260.0, 400.0, 600.0])
def test_a_budget_makes_windows_shorter_and_then_rounds_fewer(left_s: float) -> None:
    beside_s = {2.0: 6.0, 20.0: 30.0}
    plan = plan_windows((2.0, 20.0), 6, beside_s, left_s=left_s)
    assert plan.expected_s <= left_s * 1.000001 and plan.num_rounds >= 2
    assert all(window_s * rate >= LEAST_REQUESTS for rate, window_s in plan.windows_s.items())
    assert "the budget left room" in plan.notes[0]


def test_a_budget_that_holds_nothing_is_refused_with_what_it_takes() -> None:
    with pytest.raises(UsageError, match=r"take 168 s at least, and 100 s are left: give a larger --budget-s"):
        plan_windows((2.0, 20.0), 6, {2.0: 6.0, 20.0: 30.0}, left_s=100.0)


def test_what_is_given_stays_but_for_windows_without_requests() -> None:
    plan = plan_windows((1.0, 20.0), 4, {1.0: 0.0, 20.0: 0.0}, num_rounds=3, window_s=2.0)
    assert (plan.num_rounds, dict(plan.windows_s)) == (3, {1.0: 8.0, 20.0: 2.0})
    assert plan.notes == ("windows are longer than asked, 8 s at 1/s, so that 8 requests are due in each",)
    with pytest.raises(UsageError, match="3 rounds at 1, 20/s take 120 s"):
        plan_windows((1.0, 20.0), 4, {1.0: 0.0, 20.0: 0.0}, num_rounds=3, window_s=2.0, left_s=119.0)


def test_who_has_missed_every_objective_is_waited_for_no_longer() -> None:
    slo = Slo((Objective("ttft_ms", 0.95, 1000), Objective("ttlt_ms", 0.95, 10_000)))
    assert drain_s(slo, 0.1) == 12.0
    assert drain_s(Slo(), 0.1) == 5.0 and drain_s(Slo(), 60.0) == 30.0
    assert drain_s(Slo((Objective("tpot_ms", 0.95, 50),)), 1.0) == 10.0, "of TPOT alone nothing follows for an end"

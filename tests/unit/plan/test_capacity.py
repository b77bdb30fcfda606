"""Replica counts by hand, and refusals."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.core.errors import UsageError
from inferloop.measure.frontier import Capacity
from inferloop.plan.capacity import replicas_for, size


def capacity(qps: float, low: float | None = None, high: float | None = None) -> Capacity:
    return Capacity(qps, qps if low is None else low, high, "measured", True, "no measured rate passes")


def test_by_hand() -> None:
    s = size(90.0, capacity(10.0, 8.0, 12.0), rho=0.7, failure_headroom=1)
    assert (s.needed, s.low, s.high) == (13 + 1, 11 + 1, 17 + 1)
    assert "ceil(peak 90/s / (capacity 10/s * rho 0.7)) = 13" in s.reason
    assert size(2.0, capacity(10.0), failure_headroom=0).needed == 1


def test_a_rate_that_passed_beyond_the_capacity_takes_no_replica_away() -> None:
    s = size(90.0, capacity(10.0, 11.0, 12.0), rho=0.7, failure_headroom=1)
    assert (s.needed, s.low, s.high) == (13 + 1, 11 + 1, 13 + 1)


def test_a_whole_quotient_is_not_rounded_up() -> None:
    assert replicas_for(2.1, 1.0, 0.7) == 3
    assert replicas_for(2.1000001, 1.0, 0.7) == 4


def test_what_carries_nothing_does_not_fit() -> None:
    s = size(5.0, Capacity(0.0, 0.0, 2.0, "none", True, "no measured rate passes"))
    assert not s.fits
    assert (s.needed, s.low, s.high) == (None, None, None)
    assert "does not fit" in s.reason
    assert size(5.0, capacity(-1.0)).fits is False
    undecided = size(5.0, Capacity(0.0, 0.0, 4.0, "undecided", True, "no rate could be certified"))
    assert undecided.needed is None
    assert "cannot be sized" in undecided.reason
    json.dumps(s.as_json(started=1), allow_nan=False)


def test_what_is_missing_is_said() -> None:
    out = size(9.0, capacity(3.0), rho=0.9, failure_headroom=1).as_json(started=2)
    assert (out["needed"], out["started"], out["missing"]) == (5, 2, 3)
    assert (out["rho"], out["failure_headroom"], out["peak_qps"]) == (0.9, 1, 9.0)


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e3), st.floats(0.05, 0.95), st.integers(0, 3))
def test_enough_and_not_one_too_many(peak: float, qps: float, rho: float, spare: int) -> None:
    s = size(peak, capacity(qps), rho=rho, failure_headroom=spare)
    assert s.needed is not None
    carrying = s.needed - spare
    assert carrying * qps * rho >= peak * (1 - 1e-6)
    assert carrying == 1 or (carrying - 1) * qps * rho < peak


@pytest.mark.parametrize(("peak", "rho", "spare"), [(0.0, 0.7, 1), (float("nan"), 0.7, 1), (1, 1.0, 1), (1, 0.7, -1)])
def test_parameters_that_mean_nothing(peak: float, rho: float, spare: int) -> None:
    with pytest.raises(UsageError):
        size(peak, capacity(1.0), rho=rho, failure_headroom=spare)

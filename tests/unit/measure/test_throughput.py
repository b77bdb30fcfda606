"""The rate that was achieved, from stamps whose right value can be told by hand."""

from __future__ import annotations

import random

import pytest

from inferloop.core.units import NS_PER_MS
from inferloop.measure.throughput import achieved_interval, achieved_rate
from inferloop.measure.timing import RequestTiming

S = 1000.0
"""Milliseconds."""


def answers(*spans_ms: tuple[float, float], is_open: bool = False) -> list[RequestTiming]:
    """(send, end) of each."""
    stamps = [(round(a * NS_PER_MS), round(b * NS_PER_MS)) for a, b in spans_ms]
    return [RequestTiming("r", a if is_open else None, a, None, b, (), 1, 1) for a, b in stamps]


def rate_of(requests: list[RequestTiming]) -> float:
    rate = achieved_rate(requests)[0]
    assert rate is not None
    return rate


def test_two_waves_of_a_batching_server_are_one_wave_a_second() -> None:
    """Eight at once, four at a time, a second each. The seven after the first end within 1.006 s: 7.0/s is no rate of
    this server."""
    ends = (1003.1, 1003.2, 1003.9, 1004.4, 2007.0, 2007.2, 2008.3, 2009.1)
    rate, basis = achieved_rate(answers(*((0.0, end) for end in ends)))
    assert basis == "completions"
    assert rate == pytest.approx(4 / 1.0043, rel=2e-3)  # from the middle of one wave to the middle of the other


@pytest.mark.parametrize("num_waves", [2, 3, 5, 20])
def test_waves_that_end_together_have_the_rate_of_their_period(num_waves: int) -> None:
    waves = answers(*((0.0, S * (1 + i // 16)) for i in range(16 * num_waves)))
    assert achieved_rate(waves)[0] == pytest.approx(16.0)


def test_users_in_lockstep_have_the_rate_of_their_rounds() -> None:
    """The last round is sent when all others have ended, so it is not needed."""
    rounds = answers(*((S * (i // 16), S * (1 + i // 16)) for i in range(64)))
    assert achieved_rate(rounds)[0] == pytest.approx(16.0)


def test_a_burst_that_fits_at_once_tells_what_so_many_in_flight_complete() -> None:
    assert achieved_rate(answers(*[(0.0, 2 * S)] * 8)) == (4.0, "in flight")
    nearly = answers(*((0.0, 10 * S + i * 1e-3) for i in range(8)))
    assert rate_of(nearly) == pytest.approx(0.8)
    # From 0.6 to 1.3 s: nine gaps of 78 ms would be 12.9/s, but ten that take 0.95 s each are no more than 10.5.
    spread = answers(*((0.0, 600.0 + i * 700 / 9) for i in range(10)))
    assert achieved_rate(spread)[0] == pytest.approx(10 / 0.95)


def test_the_filling_of_a_pipeline_is_left_out() -> None:
    flood = answers(*((0.0, 20 * S + 500.0 * i) for i in range(81)))
    assert rate_of(flood) == pytest.approx(2.0)


def test_one_at_a_time_has_the_rate_of_its_answers() -> None:
    assert achieved_rate(answers(*((200.0 * i, 200.0 * (i + 1)) for i in range(10))))[0] == pytest.approx(5.0)
    assert achieved_rate(answers((0.0, 200.0)))[0] == pytest.approx(5.0)


def test_open_arrivals_that_are_served_have_their_own_rate() -> None:
    """Ten a second for 20 s. The last of them takes 30 s: 199 in 48 s are no rate of a service that keeps up."""
    steady = [(100.0 * i, 100.0 * i + 500.0) for i in range(200)]
    assert achieved_rate(answers(*steady, is_open=True))[0] == pytest.approx(10.0)
    assert achieved_rate(answers(*steady[:-1], (19_900.0, 49_900.0), is_open=True))[0] == pytest.approx(10.0)


def test_open_arrivals_that_are_too_many_are_completed_at_the_rate_of_the_server() -> None:
    """Twenty a second arrive, five are completed: most end after the last send, and count."""
    late = answers(*((50.0 * i, 200.0 * (i + 1)) for i in range(100)), is_open=True)
    assert achieved_rate(late)[0] == pytest.approx(5.0)


def test_answers_of_all_lengths_leave_the_rate_of_their_slots() -> None:
    """Sixteen users without a pause, a second on average, some take six: 16/s, and not what the last of them waits."""
    rng = random.Random(3)
    free, spans = [0.0] * 16, []
    for _ in range(800):
        at = min(free)
        free[free.index(at)] = end = at + rng.expovariate(1 / S)
        spans.append((at, end))
    assert rate_of(answers(*spans)) == pytest.approx(16.0, rel=0.1)


def test_the_interval_lies_around_the_rate_and_holds_the_truth() -> None:
    rng = random.Random(4)
    at, spans = 0.0, []
    for _ in range(600):
        at += rng.expovariate(10 / S)
        spans.append((at, at + rng.uniform(200.0, 900.0)))
    requests = answers(*spans, is_open=True)
    rate, interval = rate_of(requests), achieved_interval(requests)
    assert interval is not None and interval.low < rate < interval.high
    assert interval.low < 10.0 < interval.high < 1.5 * interval.low


def test_what_did_not_complete_has_no_rate() -> None:
    assert achieved_rate([]) == (None, "completions")
    failed = RequestTiming("r", None, 0, None, 5, (), 1, 0, error="timeout")
    assert achieved_rate([failed]) == (None, "completions")
    assert achieved_interval([failed]) is None
    assert achieved_rate([RequestTiming("r", None, 5, None, 5, (), 1, 1)])[0] is None
    # A failure ends sooner than what completes, and is none of it.
    assert achieved_rate([failed, *answers((0.0, S), (S, 2 * S), (2 * S, 3 * S))])[0] == pytest.approx(1.0)

"""The step-time model on synthetic steps whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from inferloop.engine.schedule.pace import MIN_PREFILL_TOKENS, StepLimits, StepTime, StepTimeFit, TimeLimit

MACHINES = [
    StepTime(fixed_ms=12.0, per_decode_ms=1.5, per_prefill_ms=0.9),
    StepTime(fixed_ms=5.0, per_decode_ms=0.02, per_prefill_ms=0.01),
    StepTime(fixed_ms=200.0, per_decode_ms=30.0, per_prefill_ms=25.0),
]


def mixed(rng: random.Random, num: int) -> Iterator[tuple[int, int]]:
    """(tokens to prefill, rows that decode) of steps as they come: mostly decodes, now and then a chunk."""
    for _ in range(num):
        yield rng.choice([0, 0, 0, rng.randint(1, 256)]), rng.randint(0, 32)


def feed(fit: StepTimeFit, truth: StepTime, rng: random.Random, num: int, noise: float = 0.1) -> None:
    for num_prefill, num_decodes in mixed(rng, num):
        if num_prefill + num_decodes:
            fit.observe(
                num_prefill, num_decodes, truth.predict(num_prefill, num_decodes) * rng.lognormvariate(0, noise)
            )


def assert_close(found: StepTime, truth: StepTime, share: float) -> None:
    for num_prefill, num_decodes in ((0, 1), (0, 16), (0, 32), (64, 0), (64, 16), (256, 32)):
        wanted = truth.predict(num_prefill, num_decodes)
        assert found.predict(num_prefill, num_decodes) == pytest.approx(wanted, rel=share)


@pytest.mark.parametrize("truth", MACHINES)
def test_it_learns_the_machine(truth: StepTime) -> None:
    fit = StepTimeFit()
    feed(fit, truth, random.Random(1), 300)
    assert_close(fit.time, truth, 0.15)


@pytest.mark.parametrize("truth", MACHINES)
def test_stalls_are_no_new_speed(truth: StepTime) -> None:
    rng, fit = random.Random(2), StepTimeFit()
    feed(fit, truth, rng, 300)
    for _ in range(100):
        feed(fit, truth, rng, 9)
        fit.observe(0, 8, truth.predict(0, 8) * 50)
    assert_close(fit.time, truth, 0.3)


def test_a_machine_that_stays_slower_is_noticed() -> None:
    rng, fit, before = random.Random(3), StepTimeFit(), MACHINES[0]
    feed(fit, before, rng, 300)
    after = StepTime(before.fixed_ms * 3, before.per_decode_ms * 3, before.per_prefill_ms * 3)
    feed(fit, after, rng, 300)
    assert_close(fit.time, after, 0.2)


def test_what_recent_steps_do_not_tell_is_remembered() -> None:
    rng, fit, truth = random.Random(4), StepTimeFit(), MACHINES[0]
    feed(fit, truth, rng, 300)
    for _ in range(5000):  # eight rows that decode, for minutes
        fit.observe(0, 8, truth.predict(0, 8) * rng.lognormvariate(0, 0.05))
    assert_close(fit.time, truth, 0.25)


def test_no_observation_breaks_it() -> None:
    rng, fit = random.Random(5), StepTimeFit()
    for _ in range(2000):
        fit.observe(rng.choice([0, 1, 10**4]), rng.choice([0, 1, 500]), rng.choice([1e-6, 1e-3, 1.0, 1e7]))
        time = fit.time
        assert min(time.fixed_ms, time.per_decode_ms, time.per_prefill_ms) >= 0
        assert time.predict(256, 32) < 1e12
    feed(fit, MACHINES[0], rng, 600)
    assert_close(fit.time, MACHINES[0], 0.3)


def test_steps_all_alike_and_then_one_beyond_all_measure_break_nothing() -> None:
    for num_prefill, num_decodes in ((0, 1), (0, 32), (256, 7), (10**6, 10**4)):
        fit = StepTimeFit(StepTime(1e-3, 1e-3, 1e-3))
        for _ in range(200):
            fit.observe(num_prefill, num_decodes, 1.0)
        for _ in range(200):
            fit.observe(10**9, 10**9, 1e12)
            fit.observe(num_prefill, num_decodes, 1e-6)
        assert 0 <= fit.time.predict(256, 32) < float("inf")


@pytest.mark.parametrize("ms", [0.0, 1.0, 12.0, 40.0, 1000.0])
@pytest.mark.parametrize("num_decodes", [0, 1, 20])
def test_what_fits_is_the_most_that_fits(ms: float, num_decodes: int) -> None:
    time = MACHINES[0]
    num = time.num_prefill_within(ms, num_decodes)
    if num:
        assert time.predict(num, num_decodes) <= ms + 1e-9
    assert time.predict(num + 1, num_decodes) > ms
    rows = time.num_decodes_within(ms)
    assert time.predict(0, rows + 1) > ms
    limits = StepLimits(TimeLimit(ms, time), TimeLimit(ms, time))
    assert limits.num_decodes(True) == max(rows, 1)
    assert limits.num_decodes(False) > 10**6, "nobody's next token is held back"
    prefill = {background: limits.num_prefill(background, num_decodes) for background in (True, False)}
    if num_decodes:
        assert prefill == {True: num, False: max(num, MIN_PREFILL_TOKENS)}
    else:
        assert prefill[True] == max(num, MIN_PREFILL_TOKENS) and prefill[False] > 10**6
    assert StepLimits().num_prefill(True, num_decodes) == StepLimits().num_prefill(False, num_decodes) > 10**6


def test_what_costs_nothing_fits_without_end() -> None:
    assert StepTime(1.0, 0.0, 0.0).num_prefill_within(2.0, 5) > 10**6
    assert StepTime(3.0, 0.0, 0.0).num_prefill_within(2.0, 5) == 0

"""How long a step may take, when to come back, and who waits in vain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.engine.schedule.columns import sampling_columns
from inferloop.engine.schedule.pace import StepLimits, StepTime, TimeLimit
from inferloop.engine.schedule.pacer import (
    BACKGROUND_STEP_MS,
    FOREGROUND_MEMORY_MS,
    MAX_RETRY_AFTER_S,
    Pacer,
    Waiting,
    late_ones,
    num_decoding,
)
from inferloop.engine.schedule.step import BlockLoads, StepPlan

TIME = StepTime(fixed_ms=10.0, per_decode_ms=1.0, per_prefill_ms=0.5)


def pacer(**options: float) -> Pacer:
    made = Pacer(max_step_tokens=100, max_sequences=10, tpot_objective_ms=options.get("tpot_objective_ms"))
    made.time = TIME
    return made


def plan(sizes: list[int], num_drafts: list[int]) -> StepPlan:
    num = len(sizes)
    return StepPlan(
        step_id=1,
        slots=np.arange(num, dtype=np.int32),
        offsets=np.cumsum([0, *sizes]).astype(np.int32),
        token_ids=np.zeros(sum(sizes), np.int32),
        first_positions=np.zeros(num, np.int32),
        block_tables=(),
        sample_rows=np.zeros(num, np.int32),
        num_drafts=np.array(num_drafts, np.int32),
        sampling=sampling_columns([], 1),
    )


def test_only_an_objective_limits_the_foreground() -> None:
    assert pacer().limits(0, True).foreground is None
    limits = pacer(tpot_objective_ms=40.0).limits(0, True)
    assert limits.foreground == TimeLimit(20.0, TIME), "half of it: nothing is known of how far off an estimate may be"
    assert limits.num_prefill(False, num_decodes=1) == (20 - 10 - 1) / 0.5
    paced = pacer(tpot_objective_ms=40.0)
    for _ in range(100):
        paced.observe(plan([1, 30], [0, 0]), 25.0)
    limit = paced.limits(0, True).foreground
    assert limit is not None and 0.9 * 40.0 < limit.ms < 40.0


def test_background_steps_are_short_while_others_may_come() -> None:
    paced = pacer()
    assert paced.limits(0, False).background is None, "nobody else was ever here"
    paced.limits(10, True)
    for now_ms in (10, 10 + FOREGROUND_MEMORY_MS - 1):
        assert paced.limits(now_ms, False).background == TimeLimit(BACKGROUND_STEP_MS, TIME)
    assert paced.limits(10 + FOREGROUND_MEMORY_MS, False).background is None
    unbounded = Pacer(max_step_tokens=100, max_sequences=10, bounds_background=False)
    assert unbounded.limits(10, True).background is None, "its steps are given up when somebody comes"
    paced.time = StepTime(fixed_ms=100.0, per_decode_ms=1.0, per_prefill_ms=0.5)
    limits = paced.limits(10, False)
    assert limits.num_decodes(True) == 25, "an empty step takes longer already"


def test_decoding_rows_are_told_from_chunks() -> None:
    assert num_decoding(plan([1, 4, 30, 1], [0, 3, 0, 0])) == 3
    paced = pacer()
    before = paced.time
    paced.observe(plan([1, 30], [0, 0]), 0.0)
    assert paced.time == before, "a stopped clock teaches nothing"
    loading = replace(plan([1, 1], [0, 0]), loads=BlockLoads((np.array([3], np.int32),), (np.zeros(8, np.uint8),)))
    paced.observe(loading, 900.0)
    assert paced.time == before, "nor does a slow disk"
    for _ in range(100):
        paced.observe(plan([1, 30], [0, 0]), 500.0)
    assert paced.time.predict(30, 1) == pytest.approx(500.0, rel=0.05)


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "seconds"),
    [
        (0, 0, 1.0),
        (10_000, 0, (100 * 10 + 10_000 * 0.5) / 1000),
        (0, 2000, (200 * 10 + 2000) / 1000),
        (10_000, 2000, (200 * 10 + 2000 + 5000) / 1000),
        (10**9, 10**9, MAX_RETRY_AFTER_S),
    ],
)
def test_when_to_come_back_is_work_by_speed(num_prompt: int, num_output: int, seconds: float) -> None:
    assert pacer().retry_after_s(num_prompt, num_output) == pytest.approx(seconds)


def test_a_prompt_takes_longer_beside_decodes_under_an_objective() -> None:
    paced, free = pacer(), StepLimits()
    limits = StepLimits(foreground=TimeLimit(25.0, TIME))
    assert paced.prefill_ms(200, 0, limits) == 2 * 10 + 200 * 0.5
    assert paced.prefill_ms(200, 5, free) == 3 * 15 + 200 * 0.5
    assert paced.prefill_ms(200, 5, limits) == 10 * 15 + 200 * 0.5, "twenty tokens a step"
    assert paced.prefill_ms(0, 5, limits) == 0


def late(waiting: list[Waiting], uncached: dict[str, int] | None = None, share: float = 1.0) -> list[str]:
    exact = uncached or {w.request_id: w.num_tokens for w in waiting}
    return late_ones(
        waiting,
        lambda n: float(n),
        exact.__getitem__,
        now_ms=1000,
        max_ttft_ms=500.0,
        share_uncached=share,
    )


def test_who_cannot_make_it_is_given_up_and_delays_nobody() -> None:
    waiting = [
        Waiting("in time", 900, 300),
        Waiting("hopeless by age", 499, 1),
        Waiting("hopeless by length", 1000, 501),
        Waiting("just", 1000, 200),
        Waiting("behind too many", 1000, 1),
    ]
    assert late(waiting) == ["hopeless by age", "hopeless by length", "behind too many"]
    assert late([]) == []


def test_nobody_is_given_up_for_a_guess() -> None:
    waiting = [Waiting("known", 1000, 5000), Waiting("new", 1000, 600)]
    assert late(waiting, {"known": 16, "new": 600}) == ["new"]
    assert late(waiting, {"known": 16, "new": 600}, share=0.05) == [], "the guess may only be too kind"


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 700)), max_size=12),
    st.lists(st.integers(0, 11), max_size=3),
)
def test_giving_up_is_enough_and_needed(rows: list[tuple[int, int]], gone: list[int]) -> None:
    """Those who are left all make it, and nobody given up would have, among those who were left before."""
    waiting = [Waiting(str(i), arrived, num) for i, (arrived, num) in enumerate(rows)]
    given_up = set(late(waiting))
    num_ahead = 0
    for one in waiting:
        makes_it = 1000 - one.arrived_ms + num_ahead + one.num_tokens <= 500
        assert makes_it == (one.request_id not in given_up)
        num_ahead += one.num_tokens if makes_it else 0
    left = [w for i, w in enumerate(waiting) if i not in gone]
    assert set(late(left)) <= given_up, "with fewer ahead nobody is worse off" if gone else ""

"""Rates that vary, users that wait, conversations that grow: the right counts, the right spread, the right chains."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferloop.contract.chains import LEAST_OWN, next_turn
from inferloop.contract.course import Course, Exponential, Piecewise, read_profile
from inferloop.contract.load import parse
from inferloop.contract.sample import sample, sample_workload
from inferloop.contract.workload import Contract
from inferloop.core.request import Segment, TimedRequest


def contract(base: Path = Path(), **changes: Any) -> Contract:
    values = {
        "model": "m",
        "qps": {"avg": 2, "p95": 3, "peak": 5},
        "input_tokens": {"p50": 480, "p95": 1200},
        "output_tokens": {"p50": 12, "p95": 32},
    }
    return parse(values | changes, base=base)


def counts_of(shaped: Contract, edges: list[float], *, runs: int, **how: Any) -> np.ndarray:
    """Arrivals per run (rows) and interval between edges (columns)."""
    found = []
    for seed in range(runs):
        times = [r.at_s for r in sample(shaped, seed=seed, duration_s=edges[-1], **how)]
        found.append(np.histogram(times, bins=edges)[0])
    return np.array(found)


def test_a_linear_ramp_integrates_to_the_right_counts() -> None:
    """From 0.5 to 1.5 of 4/s in 40 s: the mean rate of each quarter, and then 6/s."""
    shaped = contract(arrivals={"ramp": {"from": 0.5, "to": 1.5, "over": "40s"}})
    found = counts_of(shaped, [0, 10, 20, 30, 40, 50], runs=400, qps=4.0)
    assert found.mean(axis=0) == pytest.approx([25, 35, 45, 55, 60], rel=0.04)
    assert found.var(axis=0) / found.mean(axis=0) == pytest.approx(1.0, abs=0.25), "still Poisson in each"


def test_an_exponential_ramp_grows_by_the_same_factor() -> None:
    shaped = contract(arrivals={"ramp": {"shape": "exponential", "from": 0.125, "over": "30s"}})
    found = counts_of(shaped, [0, 10, 20, 30, 40], runs=400, qps=16.0)
    first = 16 * 0.125 * 10 / math.log(2)  # the integral of 2 * 2^(t/10) over the first 10 s
    assert found.mean(axis=0) == pytest.approx([first, 2 * first, 4 * first, 160], rel=0.04)


def test_a_ramp_of_constant_arrivals_is_exact() -> None:
    shaped = contract(arrivals={"process": "constant", "ramp": {"from": 0, "over": "10s"}})
    times = [r.at_s for r in sample(shaped, seed=0, num_requests=40, qps=2.0)]
    assert [round(t, 6) for t in times[:3]] == [0.0, round(math.sqrt(10), 6), round(math.sqrt(20), 6)]
    assert np.diff(times)[12:] == pytest.approx(0.5, abs=1e-6), "10 requests after 10 s, then two per second"


@pytest.mark.parametrize(
    "course",
    [
        Piecewise([(0, 0.5), (10, 2.0), (11, 0.0), (15, 0.0), (20, 4.0)], holds=True),
        Piecewise([(0, 0.0), (5, 3.0)], holds=False),
        Exponential(0.1, 3.0, 20.0),
        Exponential(2.0, 2.0, 20.0),
        Exponential(3.0, 0.5, 9.0),
    ],
)
@settings(max_examples=50, deadline=None)
@given(area=st.floats(0, 60))
def test_a_course_inverts_its_integral(course: Course, area: float) -> None:
    """Against the integral in small steps, by the rate that `time_of` itself implies nowhere."""
    t = course.time_of(area)
    if t is None:
        assert isinstance(course, Piecewise)
        return
    steps = np.linspace(0.0, t, 20_001)
    assert np.trapezoid([rate(course, float(x)) for x in steps], steps) == pytest.approx(area, rel=1e-3, abs=1e-3)


def rate(course: Course, t: float) -> float:
    """Written again, point by point."""
    if isinstance(course, Piecewise):
        xs, ys = zip(*course._points, strict=True)
        return float(np.interp(t, xs, ys))
    assert isinstance(course, Exponential)
    return float(course._start * (course._end / course._start) ** min(1.0, t / course._seconds))


def test_a_profile_keeps_its_shape_and_its_mean(tmp_path: Path) -> None:
    """A burst from 1 to 9 within 10 s is linear, not a step; played in a tenth of the time the rates are the same."""
    (tmp_path / "p.csv").write_text("seconds,qps\n0,1\n400,1\n500,9\n600,9\n700,1\n1000,1\n")
    mean = (400 + 500 + 900 + 500 + 300) / 1000
    shaped = contract(tmp_path, rate_profile={"file": "p.csv", "time_scale": 0.1})
    found = counts_of(shaped, [0, 40, 45, 50, 60, 70, 100], runs=300, qps=5.0, arrivals="profile")
    shares = np.array([40 * 1, 5 * 3, 5 * 7, 10 * 9, 10 * 5, 30 * 1]) / mean
    assert found.mean(axis=0) == pytest.approx(shares * 5.0, rel=0.06)
    whole = [len(sample(shaped, seed=s, duration_s=1e6, qps=5.0, arrivals="profile")) for s in range(200)]
    assert np.mean(whole) == pytest.approx(5.0 * 100, rel=0.03), "it ends with the profile, at the mean rate"
    assert np.var(whole) / np.mean(whole) == pytest.approx(1.0, rel=0.35)


def test_hours_are_the_means_of_their_hours(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text("hour,qps\n" + "".join(f"{h},{2 if h == 12 else 1}\n" for h in range(24)))
    points = read_profile(path)
    assert (points[0], points[1], points[13], points[-1]) == ((0, 1), (1800, 1), (12.5 * 3600, 2), (86400, 1))


def test_gaps_of_gamma_arrivals_have_the_declared_spread() -> None:
    for cv in (0.5, 1.0, 3.0):
        shaped = contract(arrivals={"process": "gamma", "cv": cv})
        gaps = np.diff([0.0, *(r.at_s for r in sample(shaped, seed=5, num_requests=20_000, qps=10.0))])
        assert gaps.mean() == pytest.approx(0.1, rel=0.08)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


def test_a_closed_loop_is_one_chain_per_user() -> None:
    shaped = contract(arrivals={"process": "closed", "users": 3, "think_ms": {"p50": 400, "p95": 2000}})
    requests = sample(shaped, seed=1, num_requests=50)
    heads = [r for r in requests if r.after is None]
    assert len(requests) == 50 and len(heads) == 3
    assert len({r.after for r in requests if r.after is not None}) == 47, "nobody is followed by two"
    assert all(r.after is None or r.after < r.index for r in requests)
    assert all(r.session is None for r in requests)
    pauses = [r.at_s for r in sample(shaped, seed=1, num_requests=4000)]
    assert np.quantile(pauses, (0.5, 0.95)) == pytest.approx((0.4, 2.0), rel=0.15)
    assert {r.at_s for r in sample(contract(), seed=1, num_requests=9)} != {0.0}
    eager = sample_workload(contract(), seed=1, num_requests=9, arrivals="closed", users=4).requests
    assert {r.at_s for r in eager} == {0.0} and sum(r.after is None for r in eager) == 4


def conversations(requests: tuple[TimedRequest, ...]) -> dict[int, list[TimedRequest]]:
    found: dict[int, list[TimedRequest]] = {}
    for request in requests:
        if request.session is not None:
            found.setdefault(request.session, []).append(request)
    return found


def test_turns_grow_and_follow_each_other() -> None:
    shaped = contract(turns={"p0": 2, "p50": 3, "p95": 6}, think_ms={"p50": 8000})
    requests = sample(shaped, seed=3, num_requests=400, qps=2.0)
    assert [r.index for r in requests] == list(range(400))
    found = conversations(requests)
    assert sum(len(turns) for turns in found.values()) >= 399, "the last may be cut to one"
    num_whole = 0
    for turns in found.values():
        assert [t.after for t in turns] == [None, *(t.index for t in turns[:-1])]
        assert all(t.at_s == 8.0 for t in turns[1:])
        for before, after in pairwise(turns):
            assert after.input_tokens >= before.input_tokens
            num_whole += after.segments[: len(before.segments)] == before.segments
    followers = 400 - len(found)
    assert num_whole > 0.75 * followers, "most turns have room for all that was said before"


def test_loops_keep_the_declared_lengths_and_the_rate_of_queries() -> None:
    loop = contract(
        queries_per_request={"p0": 1, "p50": 3, "p95": 8}, tool_ms={"p50": 300, "p95": 2000}, prefix_reuse=0.5
    )
    requests = sample(loop, seed=2, num_requests=4000)
    inputs = [r.input_tokens for r in requests]
    assert np.quantile(inputs, (0.5, 0.95)) == pytest.approx((480, 1200), rel=0.03)
    counts = [len(sample(loop, seed=s, duration_s=200.0, qps=2.0)) for s in range(60)]
    assert np.mean(counts) == pytest.approx(400, rel=0.06), "queries of the jobs that begin in 200 s"
    gaps = [r.at_s for r in requests if r.after is not None]
    assert np.quantile(gaps, (0.5, 0.95)) == pytest.approx((0.3, 2.0), rel=0.1)


@pytest.mark.parametrize("reuse", [0.5, 0.6, 0.7])
def test_reuse_of_conversations_is_made_up_to_what_is_declared(reuse: float) -> None:
    shaped = contract(turns={"p0": 1, "p50": 2, "p95": 4}, prefix_reuse=reuse)
    workload = sample_workload(shaped, seed=4, num_requests=600)
    assert workload.prefix_reuse == pytest.approx(reuse, abs=0.04)
    assert workload.declared_prefix_reuse == pytest.approx(reuse)


def test_turns_of_turns_think_between_and_run_tools_within() -> None:
    both = contract(turns=2, think_ms=9000, queries_per_request=3, tool_ms=100)
    requests = sample(both, seed=0, num_requests=60)
    for turns in conversations(requests).values():
        assert [t.at_s for t in turns[1:]] == [0.1, 0.1, 9.0, 0.1, 0.1]


def test_all_at_once_takes_conversations_apart() -> None:
    requests = sample(contract(turns=3), seed=0, num_requests=30, arrivals="burst")
    assert {(r.at_s, r.after, r.session) for r in requests} == {(0.0, None, None)}
    assert any(len(r.segments) > 1 for r in requests)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=5), st.integers(1, 90), st.integers(1, 900))
def test_a_next_turn_has_its_length_and_something_new(before: list[int], answered: int, length: int) -> None:
    said = tuple(Segment(i, n) for i, n in enumerate(before))
    made = next_turn(said, Segment(90, answered, "assistant"), 99, length)
    assert sum(s.num_tokens for s in made) == length
    assert made[-1].key == 99 and made[-1].role == "user"
    assert made[-1].num_tokens >= min(LEAST_OWN, length // 2) > 0 or length == 1
    for mine, theirs in zip(made[:-1], (*said, Segment(90, answered, "assistant")), strict=False):
        assert (mine.key, mine.role) == (theirs.key, theirs.role) and mine.num_tokens <= theirs.num_tokens

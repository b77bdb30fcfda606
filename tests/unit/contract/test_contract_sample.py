"""Sampled workloads: seeded, never rescaled, with the declared lengths, mix and prefix reuse."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferloop.contract.load import parse
from inferloop.contract.prefixes import plan_prefixes
from inferloop.contract.reuse import measured_reuse
from inferloop.contract.sample import sample, sample_workload
from inferloop.contract.workload import Contract
from inferloop.core.digest import digest_of
from inferloop.core.errors import UsageError
from inferloop.core.request import Segment, TimedRequest


def contract(**changes: Any) -> Contract:
    base = {
        "model": "m",
        "qps": {"avg": 2, "p95": 3, "peak": 5},
        "input_tokens": {"p50": 48, "p95": 120},
        "output_tokens": {"p50": 12, "p95": 32},
        "prefix_reuse": 0.3,
    }
    return parse(base | changes)


def test_same_seed_same_requests_on_every_machine() -> None:
    requests = sample(contract(), seed=7, num_requests=50)
    assert requests == sample(contract(), seed=7, num_requests=50)
    assert digest_of(requests) == "b2182eae700d9bc5fc58c5eeb99016a847b3c4a5ab9c06e31253e0ea054ff23e"
    assert requests != sample(contract(), seed=8, num_requests=50)


def test_another_rate_is_the_same_work_closer_together() -> None:
    slow, fast = (sample(contract(), seed=1, num_requests=40, qps=qps) for qps in (1.0, 4.0))
    assert [r.input_tokens for r in slow] == [r.input_tokens for r in fast]
    assert [r.segments for r in slow] == [r.segments for r in fast]
    assert [r.at_s for r in fast] == pytest.approx([r.at_s / 4 for r in slow], abs=1e-6)


def test_streams_share_no_text() -> None:
    streams = [sample(contract(), seed=1, num_requests=100, stream=f"sweep/{i}/0") for i in range(4)]
    keys = [{segment.key for r in requests for segment in r.segments} for requests in streams]
    assert all(len(k) > 100 for k in keys) and len(set.union(*keys)) == sum(len(k) for k in keys)


@pytest.mark.parametrize("process", ["poisson", "gamma"])
def test_counts_vary_as_the_process_says(process: str) -> None:
    """Rescaled gaps would make every run end at n / rate and this ratio fall towards 0."""
    arrivals: Any = {"process": "gamma", "cv": 2.0} if process == "gamma" else process
    shaped = contract(arrivals=arrivals, prefix_reuse=0)
    counts = [len(sample(shaped, seed=s, duration_s=20.0, qps=2.0)) for s in range(400)]
    expected = 1.0 if process == "poisson" else 4.0
    assert np.mean(counts) == pytest.approx(40, rel=0.05)
    assert np.var(counts) / np.mean(counts) == pytest.approx(expected, rel=0.3)


def test_fixed_number_of_poisson_requests_has_a_varying_end() -> None:
    ends = [sample(contract(), seed=s, num_requests=100, qps=2.0)[-1].at_s for s in range(200)]
    assert np.std(ends) == pytest.approx(np.sqrt(100) / 2.0, rel=0.25)


def test_constant_arrivals_do_not_drift() -> None:
    requests = sample(contract(), seed=0, num_requests=10_000, qps=300.0, arrivals="constant")
    assert requests[-1].at_s == pytest.approx(9_999 / 300, abs=1e-8)
    assert len(sample(contract(), seed=0, duration_s=2.0, qps=3.0, arrivals="constant")) == 6


@pytest.mark.parametrize("arrivals", ["burst", "serial"])
def test_all_at_once_keeps_the_order(arrivals: str) -> None:
    requests = sample(contract(), seed=0, num_requests=5, arrivals=arrivals)
    assert [(r.index, r.at_s) for r in requests] == [(i, 0.0) for i in range(5)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_requests": 3, "arrivals": "poison"}, "did you mean poisson"),
        ({"num_requests": 3, "qps": 0.0}, "need a rate above 0"),
        ({"num_requests": 0}, "at least 1"),
        ({"duration_s": float("inf")}, "above 0"),
        ({}, "how many requests"),
        ({"duration_s": 3.0, "arrivals": "burst"}, "need a number of requests"),
        ({"duration_s": 3.0, "arrivals": "closed", "users": 2}, "need a number of requests and of users"),
        ({"num_requests": 3, "arrivals": "closed"}, "need a number of requests and of users"),
        ({"num_requests": 3, "arrivals": "closed", "users": 0}, "needs one user at least"),
        ({"num_requests": 3, "arrivals": "trace"}, "names no trace"),
        ({"num_requests": 3, "arrivals": "profile"}, "no rate_profile"),
    ],
)
def test_what_cannot_be_sampled_is_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        sample_workload(contract(), seed=0, **arguments)


def test_lengths_follow_the_contract() -> None:
    requests = sample(contract(), seed=3, num_requests=10_000, arrivals="burst")
    inputs, outputs = [r.input_tokens for r in requests], [r.output_tokens for r in requests]
    assert np.quantile(inputs, (0.5, 0.95)) == pytest.approx((48, 120), rel=0.05)
    assert np.quantile(outputs, (0.5, 0.95)) == pytest.approx((12, 32), rel=0.05)
    assert abs(np.corrcoef(inputs, outputs)[0, 1]) < 0.05


def test_classes_keep_long_with_long() -> None:
    mixed = contract(
        classes=[
            {"name": "long", "share": 0.2, "input_tokens": 900, "output_tokens": 90, "prefix_reuse": 0},
            {"name": "short", "share": 0.8, "input_tokens": 30, "output_tokens": 5},
        ]
    )
    requests = sample(mixed, seed=1, num_requests=500)
    assert sum(r.traffic_class == "long" for r in requests) == 100
    assert {(r.traffic_class, r.input_tokens, r.output_tokens) for r in requests} == {
        ("long", 900, 90),
        ("short", 30, 5),
    }
    assert {len(r.segments) for r in requests if r.traffic_class == "long"} == {1}


def test_clipping_is_counted() -> None:
    long = contract(input_tokens={"p50": 400, "p95": 4000}, output_tokens={"p50": 100, "p95": 300})
    free = sample_workload(long, seed=1, num_requests=200)
    fitting = sample_workload(long, seed=1, num_requests=200, context_limit=1000)
    assert free.num_clipped == 0
    too_long = [r for r in free.requests if r.input_tokens + r.output_tokens > 1000]
    assert fitting.num_clipped == len(too_long) > 10
    assert max(r.input_tokens + r.output_tokens for r in fitting.requests) == 1000
    assert fitting.prefix_reuse == pytest.approx(0.3, abs=0.02)
    tight = sample_workload(long, seed=1, num_requests=50, context_limit=2)
    assert {(r.input_tokens, r.output_tokens) for r in tight.requests} == {(1, 1)}


def test_without_reuse_nothing_is_shared() -> None:
    requests = sample(contract(prefix_reuse=0), seed=1, num_requests=200)
    assert {len(r.segments) for r in requests} == {1}


@settings(max_examples=60, deadline=None)
@given(
    reuse=st.floats(0, 0.9),
    p50=st.integers(20, 3000),
    spread=st.floats(1, 7),
    num_requests=st.integers(100, 600),
    seed=st.integers(0, 2**32),
)
def test_reuse_is_what_was_declared(reuse: float, p50: int, spread: float, num_requests: int, seed: int) -> None:
    shaped = contract(input_tokens={"p50": p50, "p95": p50 * spread}, prefix_reuse=reuse)
    workload = sample_workload(shaped, seed=seed, num_requests=num_requests, arrivals="burst")
    assert workload.prefix_reuse == pytest.approx(reuse, abs=0.02)
    assert workload.declared_prefix_reuse == pytest.approx(reuse)
    assert all(s.num_tokens > 0 for r in workload.requests for s in r.segments)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.floats(0, 0.99), st.randoms(use_true_random=False))
def test_planned_repeats_equal_a_count_token_by_token(lengths: list[int], reuse: float, random: Any) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    plan = plan_prefixes(lengths, reuse, order)
    seen: set[tuple[int, int]] = set()
    repeated = 0
    for group, shared in zip(plan.groups, plan.tokens, strict=True):
        tokens = {(group, position) for position in range(shared)}
        repeated += len(tokens & seen)
        seen |= tokens
    assert repeated == plan.num_repeated <= round(reuse * sum(lengths))


def test_impossible_reuse_is_told_not_hidden() -> None:
    workload = sample_workload(contract(input_tokens=1, prefix_reuse=0.5), seed=0, num_requests=100)
    assert (workload.prefix_reuse, workload.declared_prefix_reuse) == (0.0, 0.5)
    assert measured_reuse(()) == 0.0


texts = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 6), st.sampled_from(["user", "assistant"])), min_size=1, max_size=5
)


@settings(max_examples=200, deadline=None)
@given(st.lists(texts, max_size=12))
def test_reuse_equals_a_comparison_with_every_earlier_prompt(prompts: list[list[tuple[int, int, Any]]]) -> None:
    """Each token is what its text and role say at its place; a segment says where its text was begun."""
    requests = [TimedRequest(i, 0.0, tuple(Segment(*s) for s in p), 1) for i, p in enumerate(prompts)]

    def spelled(request: TimedRequest) -> list[tuple[Any, ...]]:
        ends: tuple[Any, ...] = ()
        out = []
        for s in request.segments:
            out += [(ends, s.key, s.role, place) for place in range(s.num_tokens)]
            ends = (*ends, (s.key, s.role, s.num_tokens))
        return out

    tokens = [spelled(r) for r in requests]
    repeated = 0
    for i, mine in enumerate(tokens):
        common = [sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(mine, t, strict=False))) for t in tokens[:i]]
        repeated += max(common, default=0)
    total = sum(len(t) for t in tokens)
    assert measured_reuse(requests) == (repeated / total if total else 0.0)

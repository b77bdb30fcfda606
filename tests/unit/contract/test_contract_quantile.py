"""The fitted quantile function passes through what was declared, never falls, and has no absurd tail."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.contract.draws import Draws
from inferloop.contract.quantile import TAIL_FACTOR, QuantileFunction
from inferloop.contract.workload import Distribution

PAIRS = [(1, 3), (1, 1), (10, 10), (48, 120), (180, 1200), (1200, 8000), (1, 2000), (5, 100_000), (2, 3)]


def distribution(**percentiles: float) -> Distribution:
    return Distribution(tuple((float(k[1:].replace("_", ".")) / 100, v) for k, v in percentiles.items()))


@pytest.mark.parametrize(("p50", "p95"), PAIRS)
@pytest.mark.parametrize("seed", range(5))
def test_sampled_lengths_have_the_declared_percentiles(p50: int, p95: int, seed: int) -> None:
    function = QuantileFunction(distribution(p50=p50, p95=p95))
    lengths = [function.count(u) for u in Draws(seed, "test").stratified(10_000)]
    assert np.quantile(lengths, 0.5) == pytest.approx(p50, rel=0.05)
    assert np.quantile(lengths, 0.95) == pytest.approx(p95, rel=0.05)
    assert min(lengths) >= 1
    assert max(lengths) <= TAIL_FACTOR * p95


@pytest.mark.parametrize("seed", range(3))
def test_three_points_are_all_met(seed: int) -> None:
    function = QuantileFunction(distribution(p50=100, p90=150, p99=5000))
    lengths = [function.count(u) for u in Draws(seed, "test").stratified(10_000)]
    for quantile, value in ((0.5, 100), (0.9, 150), (0.99, 5000)):
        assert np.quantile(lengths, quantile) == pytest.approx(value, rel=0.05)


def test_two_points_are_the_lognormal_through_them() -> None:
    function = QuantileFunction(distribution(p50=100, p95=400))
    sigma = math.log(4) / 1.6448536269514722
    assert function(0.8413447460685429) == pytest.approx(100 * math.exp(sigma))
    assert function(0.05) == pytest.approx(25)


def test_constants_and_bounds() -> None:
    assert {QuantileFunction(distribution(p50=7))(q) for q in (0.0, 0.3, 0.5, 0.95)} == {7.0}
    bounded = QuantileFunction(distribution(p0=10, p50=20, p100=30))
    assert (bounded(0.0), bounded(1.0)) == (10.0, 30.0)
    assert bounded(1e-9) == pytest.approx(10.0)
    assert bounded(1 - 1e-9) == pytest.approx(30.0)
    waits = QuantileFunction(distribution(p50=0, p95=100))
    assert (waits(0.1), waits(0.5), waits(0.95)) == (0.0, 0.0, 100.0)


@pytest.mark.parametrize("quantile", [-0.1, 1.1, math.nan])
def test_only_quantiles_have_a_value(quantile: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        QuantileFunction(distribution(p50=7))(quantile)


@st.composite
def distributions(draw: st.DrawFn) -> Distribution:
    quantiles = sorted(draw(st.sets(st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0]), min_size=1)))
    values = sorted(draw(st.lists(st.floats(0, 1e9), min_size=len(quantiles), max_size=len(quantiles))))
    return Distribution(tuple(zip(quantiles, values, strict=True)))


@given(distributions(), st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_it_never_falls_and_meets_every_point(given_points: Distribution, quantiles: list[float]) -> None:
    function = QuantileFunction(given_points)
    everywhere = sorted([*quantiles, *(q for q, _ in given_points.points)])
    values = [function(q) for q in everywhere]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(values))
    assert all(math.isfinite(v) and v >= 0 for v in values)
    assert all(function(q) == v for q, v in given_points.points)


def test_mean_of_a_lognormal() -> None:
    function = QuantileFunction(distribution(p50=100, p95=200))
    sigma = math.log(2) / 1.6448536269514722
    assert function.mean() == pytest.approx(100 * math.exp(sigma**2 / 2), rel=0.01)

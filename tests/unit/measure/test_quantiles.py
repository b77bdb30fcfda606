"""Quantiles are exact and only published when enough samples stand behind them."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.measure.quantiles import binomial_cdf, min_samples, percentile, quantile


@pytest.mark.parametrize(("q", "floor"), [(0.9, 64), (0.95, 130), (0.99, 662), (0.999, 6636)])
def test_published_floors_of_early_stopping(q: float, floor: int) -> None:
    assert min_samples(q) == floor
    samples = [1.0] * floor
    assert percentile(samples, q).value == 1.0
    assert percentile(samples[1:], q).value is None


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=300), st.floats(0.001, 1.0))
def test_quantile_is_the_smallest_sample_that_covers_q(samples: list[float], q: float) -> None:
    ordered = sorted(samples)
    found = quantile(ordered, q)
    assert sum(x <= found for x in ordered) >= q * len(ordered) - 1e-6
    assert sum(x < found for x in ordered) < q * len(ordered) + 1e-6


def test_rank_survives_floating_point() -> None:
    for n in range(20, 4000, 20):
        assert quantile(list(range(1, n + 1)), 0.95) == n * 19 // 20


def test_below_the_floor_there_is_no_number() -> None:
    p = percentile([1.0] * 100, 0.95)
    assert (p.value, p.num_more_needed) == (None, 30)
    assert p.text == "not certifiable, 30 more needed"


def test_correlated_samples_count_by_their_sources() -> None:
    gaps = [float(i) for i in range(10_000)]
    assert percentile(gaps, 0.99, num_independent=100).value is None
    assert percentile(gaps, 0.99).value == 9899.0


def test_failures_make_the_tail_infinite() -> None:
    p = percentile([10.0] * 6 + [math.inf] * 250, 0.95)
    assert p.value == math.inf
    assert p.text == "infinite"


def test_binomial_cdf_against_exact_sums() -> None:
    rng = random.Random(7)
    for _ in range(50):
        n, p = rng.randint(1, 60), rng.random()
        k = rng.randint(0, n)
        exact = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
        assert binomial_cdf(k, n, p) == pytest.approx(exact, abs=1e-10)


@pytest.mark.parametrize("k", [0, 40, 60, 99, 100, 101, 140, 200, 1999])
def test_binomial_cdf_holds_in_both_tails_of_large_samples(k: int) -> None:
    exact = Fraction(sum(math.comb(2000, i) * 19 ** (2000 - i) for i in range(k + 1)), 20**2000)
    assert binomial_cdf(k, 2000, 0.05) == pytest.approx(float(exact), rel=1e-8, abs=1e-300)
    assert 1.0 - binomial_cdf(k, 2000, 0.05) == pytest.approx(float(1 - exact), rel=1e-6, abs=1e-12)


def test_binomial_cdf_of_millions() -> None:
    """Against the normal distribution with its correction for continuity; and it never falls as k grows."""
    n, p = 4_000_000, 0.01
    deviation = math.sqrt(n * p * (1 - p))
    for k in (39_600, 40_000, 40_500):
        assert binomial_cdf(k, n, p) == pytest.approx(NormalDist(n * p, deviation).cdf(k + 0.5), abs=1e-3)
    found = [binomial_cdf(k, n, p) for k in range(39_990, 40_010)]
    assert found == sorted(found)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="need samples"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match="0 < q < 1"):
        min_samples(1.0)

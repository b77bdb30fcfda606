"""Intervals against series whose truth is known: blocks hold what the correlation of a queue does to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest

from inferloop.core.slo import Objective, Slo
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.bootstrap import BlockBootstrap
from inferloop.measure.columns import Floats
from inferloop.measure.margin import margin_interval
from inferloop.measure.timing import Chunk, RequestTiming

Make = Callable[[np.random.Generator, int], Floats]
_RUNS = 150


def independent(rng: np.random.Generator, n: int) -> Floats:
    return rng.exponential(size=n)


def ar1(rng: np.random.Generator, n: int, phi: float = 0.9) -> Floats:
    """Standard normal marginals, correlation phi between neighbours."""
    noise = rng.normal(size=n + 200) * math.sqrt(1 - phi * phi)
    series = np.empty(n + 200)
    series[0] = rng.normal()
    for i in range(1, n + 200):
        series[i] = phi * series[i - 1] + noise[i]
    return series[200:]


def mm1(rng: np.random.Generator, n: int, rho: float = 0.7) -> Floats:
    """Times in an M/M/1 queue of service rate 1 in the steady state (Lindley 1952); exponential of mean 1/(1-rho)."""
    gaps, work = rng.exponential(1 / rho, n + 2000), rng.exponential(1.0, n + 2000)
    walk = np.concatenate([[0.0], np.cumsum(work[:-1] - gaps[1:])])
    sojourn: Floats = walk - np.minimum.accumulate(walk) + work
    return sojourn[2000:]


def naive(values: Floats, q: float) -> tuple[float, float]:
    """The 95 % interval by order statistics, which takes the values for independent."""
    ordered, n = np.sort(values), len(values)
    half = 1.96 * math.sqrt(n * q * (1 - q))
    return float(ordered[max(0, int(n * q - half) - 1)]), float(ordered[min(n - 1, math.ceil(n * q + half))])


@pytest.mark.parametrize(
    ("make", "n", "q", "truth", "least", "naive_most"),
    [
        (independent, 400, 0.5, math.log(2), 0.90, 1.0),
        (independent, 400, 0.95, -math.log(0.05), 0.90, 1.0),
        (ar1, 1000, 0.5, 0.0, 0.88, 0.6),
        (ar1, 1000, 0.95, NormalDist().inv_cdf(0.95), 0.84, 0.65),
        (mm1, 2000, 0.5, math.log(2) / 0.3, 0.88, 0.6),
        (mm1, 8000, 0.95, -math.log(0.05) / 0.3, 0.86, 0.5),
    ],
)
def test_blocks_cover_the_truth_where_independence_does_not(
    make: Make, n: int, q: float, truth: float, least: float, naive_most: float
) -> None:
    covered = covered_naively = 0
    for seed in range(_RUNS):
        values = make(np.random.default_rng(seed), n)
        bootstrap = BlockBootstrap.of(np.arange(n), num_resamples=500)
        assert bootstrap is not None
        interval = bootstrap.interval(bootstrap.quantile(values, np.arange(n), q), 0.95)
        low, high = naive(values, q)
        covered += interval.low <= truth <= interval.high
        covered_naively += low <= truth <= high
    assert covered / _RUNS >= least
    assert covered_naively / _RUNS <= naive_most


def test_a_rate_is_covered_too() -> None:
    """Completions of an AR(1)-modulated process: sums over cells, resampled in blocks."""
    covered = 0
    for seed in range(_RUNS):
        rng = np.random.default_rng(seed)
        counts = rng.poisson(10 * np.exp(0.3 * ar1(rng, 400) - 0.045)).astype(np.float64)
        bootstrap = BlockBootstrap.of(np.arange(400), num_resamples=500)
        assert bootstrap is not None
        interval = bootstrap.interval(bootstrap.ratio(counts, np.ones(400)), 0.95)
        covered += interval.low <= 10.0 <= interval.high
    assert covered / _RUNS >= 0.87


def test_bins_do_not_move_a_quantile() -> None:
    """The fast way against sorting every replicate."""
    rng = np.random.default_rng(1)
    for n, per in ((60, 1), (250, 3)):
        owners = np.repeat(np.arange(n), per)
        values = np.where(rng.random(n * per) < 0.05, np.inf, rng.integers(0, 50, n * per).astype(np.float64))
        bootstrap = BlockBootstrap.of(np.arange(n), num_resamples=40)
        assert bootstrap is not None
        for q in (0.5, 0.9, 0.95):
            slow = []
            for counts in bootstrap.counts:
                times = counts[bootstrap.cell_of[owners]].astype(np.int64)
                replicate = np.sort(np.repeat(values, times))
                slow.append(replicate[max(1, math.ceil(q * len(replicate) - 1e-9)) - 1])
            assert list(bootstrap.quantile(values, owners, q)) == slow


def as_requests(sojourns_ms: Floats) -> list[RequestTiming]:
    made = []
    for i, ms in enumerate(sojourns_ms):
        t, end = i * NS_PER_S // 100, i * NS_PER_S // 100 + round(ms * NS_PER_MS)
        made.append(RequestTiming(str(i), t, t, None, end, (Chunk(end, 1), Chunk(end + NS_PER_MS, 1)), 1, 2))
    return made


@pytest.mark.parametrize("load", [0.9, 1.0, 1.1])
def test_the_joint_margin_is_covered(load: float) -> None:
    """Two objectives on one queue; the limit of the binding one is at, inside or outside its true quantile."""
    p95 = -math.log(0.05) / 0.3 * 100.0
    slo = Slo((Objective("ttft_ms", 0.95, p95 / load), Objective("ttlt_ms", 0.5, 10_000.0)))
    truth = 1.0 - load
    covered = passed = failed = 0
    runs = 60
    for seed in range(runs):
        found = margin_interval(slo, as_requests(mm1(np.random.default_rng(seed), 3000) * 100.0), num_resamples=300)
        assert found is not None and found.low <= found.margin <= found.high and found.num_blocks >= 10
        covered += found.low <= truth <= found.high
        passed += found.low > 0
        failed += found.high < 0
    assert covered / runs >= 0.86
    if load > 1.0:
        assert passed <= 0.08 * runs
    if load < 1.0:
        assert failed <= 0.08 * runs

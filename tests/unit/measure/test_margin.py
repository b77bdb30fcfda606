"""The joint margin's interval: which objective binds, what too few, failed and unfinished requests do to it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from inferloop.core.slo import Objective, Slo
from inferloop.core.units import NS_PER_MS
from inferloop.measure.bootstrap import BlockBootstrap, expanded_tails
from inferloop.measure.margin import margin_interval
from inferloop.measure.students_t import t_cdf, t_quantile
from inferloop.measure.timing import Chunk, RequestTiming

TTFT = Objective("ttft_ms", 0.95, 400.0)
TPOT = Objective("tpot_ms", 0.95, 20.0)


def request(
    i: int, ttft: float, *, tpot: float = 10.0, error: str | None = None, cls: str = "default"
) -> RequestTiming:
    start = i * 10 * NS_PER_MS
    first = start + round(ttft * NS_PER_MS)
    last = first + round(tpot * NS_PER_MS)
    chunks = () if error else (Chunk(first, 1), Chunk(last, 1))
    return RequestTiming(str(i), start, start, None, last, chunks, 1, 2, error=error, traffic_class=cls)


def some(n: int, seed: int = 0) -> list[RequestTiming]:
    rng = np.random.default_rng(seed)
    return [request(i, float(rng.uniform(50, 200)), tpot=float(rng.uniform(5, 19))) for i in range(n)]


def test_the_least_margin_binds() -> None:
    found = margin_interval(Slo((TTFT, TPOT)), some(1000))
    assert found is not None
    assert found.worst == TPOT.label
    assert found.margin == pytest.approx((20 - 18.3) / 20, abs=0.02)
    assert found.low <= found.margin <= found.high
    assert found.low > 0


def test_equal_runs_have_equal_intervals() -> None:
    assert margin_interval(Slo((TTFT,)), some(300)) == margin_interval(Slo((TTFT,)), some(300))
    made = [BlockBootstrap.of(range(300), num_resamples=20, seed=seed) for seed in (0, 0, 1)]
    assert made[0] is not None and made[1] is not None and made[2] is not None
    assert (made[0].counts == made[1].counts).all()
    assert (made[0].counts != made[2].counts).any()


def test_too_few_requests_bound_nothing_from_above() -> None:
    """Twenty requests say nothing of the worst one in twenty, whatever a bootstrap of them says."""
    few = margin_interval(Slo((TTFT,)), some(20))
    assert few is not None and few.low == -math.inf and few.high <= 1.0
    p99 = margin_interval(Slo((replace(TTFT, quantile=0.99),)), some(300))
    assert p99 is not None and p99.low == -math.inf
    tiny = margin_interval(Slo((TTFT,)), some(5))
    assert tiny is not None and (tiny.num_blocks, tiny.low) == (0, -math.inf)
    assert json.loads(json.dumps(tiny.as_json(), allow_nan=False))["low"] is None


def test_more_requests_and_less_confidence_narrow_it() -> None:
    wide, narrow = margin_interval(Slo((TTFT,)), some(400)), margin_interval(Slo((TTFT,)), some(4000))
    assert wide is not None and narrow is not None
    assert narrow.high - narrow.low < wide.high - wide.low
    loose = margin_interval(Slo((TTFT,)), some(400), 0.5)
    assert loose is not None and loose.high - loose.low < wide.high - wide.low


def test_failures_are_infinitely_far_outside() -> None:
    lost = [request(i, 0, error="timeout") if i % 4 == 0 else r for i, r in enumerate(some(400))]
    found = margin_interval(Slo((TTFT,)), lost)
    assert found is not None and (found.margin, found.low, found.high) == (-math.inf, -math.inf, -math.inf)
    assert margin_interval(Slo((TTFT,)), [request(i, 0, error="client") for i in range(50)]) is None
    assert margin_interval(Slo(max_error_rate=0.1), some(50)) is None
    assert margin_interval(Slo((Objective("queue_ms", 0.95, 1.0),)), some(50)) is None


def test_what_was_cut_off_may_be_fast_or_slow() -> None:
    cut = [replace(request(i, 100, error="censored"), t_end_ns=i * 10 * NS_PER_MS + 1) for i in range(300, 330)]
    found = margin_interval(Slo((TTFT,)), [*some(300), *cut])
    assert found is not None and found.low == -math.inf and found.high > 0.4


def test_scope_and_order_do_not_matter_to_it() -> None:
    requests = some(300)
    others = [request(i, 9000, cls="batch") for i in range(300)]
    scoped = Slo((TTFT,), scope=("default",))
    assert margin_interval(scoped, [*others, *requests]) == margin_interval(Slo((TTFT,)), requests)
    assert margin_interval(Slo((TTFT,)), requests[::-1]) == margin_interval(Slo((TTFT,)), requests)


def test_blocks() -> None:
    assert BlockBootstrap.of(range(19)) is None
    with pytest.raises(ValueError, match="at least 10 blocks"):
        BlockBootstrap.of(range(100), num_blocks=9)
    made = BlockBootstrap.of(range(100), num_resamples=50)
    assert made is not None
    assert (made.counts.sum(axis=1) >= 100).all()
    first = np.flatnonzero(made.counts[0])
    assert len(first) < 100, "a replicate leaves something out"
    neighbours = made.counts[:, :-1] > 0
    together = ((made.counts[:, 1:] > 0) & neighbours).sum() / neighbours.sum()
    assert together > 0.85, "neighbours come together"
    empty = made.interval(made.quantile(np.zeros(0), np.zeros(0, np.int64), 0.5), 0.95)
    assert (empty.low, empty.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("p", "dof", "t"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.95, 10, 1.81246), (0.995, 30, 2.75), (0.025, 15, -2.13145)],
)
def test_quantiles_of_t(p: float, dof: int, t: float) -> None:
    assert t_quantile(p, dof) == pytest.approx(t, rel=1e-5)
    assert t_cdf(t_quantile(p, dof), dof) == pytest.approx(p)


def test_tails_are_wider_than_the_normal_ones() -> None:
    low, high = expanded_tails(0.95, 12)
    assert 0.01 < low < 0.0125 and high == pytest.approx(1 - low)
    for wrong in (0.0, 1.0):
        with pytest.raises(ValueError, match="confidence"):
            expanded_tails(wrong, 12)
    with pytest.raises(ValueError, match="degree"):
        t_cdf(1.0, 0)
    with pytest.raises(ValueError, match="0 < p < 1"):
        t_quantile(1.0, 3)

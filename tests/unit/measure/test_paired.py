"""Equals are called equal, and real differences by their sign; Pareto fronts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inferloop.core.slo import Slo
from inferloop.measure.bootstrap import Interval
from inferloop.measure.paired import Difference, Figure, Pair, Seen, decide, noise_floor, see
from inferloop.measure.pareto import dominated_by, dominates
from inferloop.measure.timing import Chunk, RequestTiming

MS = 1_000_000


def window(rng: np.random.Generator, work: np.ndarray, *, slower: float, spread: float) -> list[RequestTiming]:
    """Requests of unequal `work`; the whole window is faster or slower by chance."""
    scale, made = slower * math.exp(rng.normal(0, spread)), []
    for i, size in enumerate(work):
        t, gap = i * 50 * MS, int(scale * (5 + rng.exponential(0.5)) * MS)
        first = t + int(scale * (20 + 30 * size + rng.exponential(5)) * MS)
        chunks = tuple(Chunk(first + k * gap, 1) for k in range(4))
        made.append(RequestTiming(f"r{i}", t, t, t, chunks[-1].t_ns, chunks, 20, 4, finish_reason="length"))
    return made


def pairs(rng: np.random.Generator, *, slower: float = 1.0, num: int = 4, spread: float = 0.03) -> list[Pair]:
    found = []
    for _ in range(num):
        work = rng.exponential(1, 35)
        found.append(tuple(window(rng, work, slower=s, spread=spread) for s in (1.0, slower)))
    return found  # type: ignore[return-value]


def compared(seed: int, **how: float) -> list[Difference]:
    rng = np.random.default_rng(seed)
    return decide(see(pairs(rng, **how), pairs(rng), Slo()))  # type: ignore[arg-type]


def test_equals_are_called_equal_for_38_of_40_seeds() -> None:
    wrong = sum(any(d.called != "none" for d in compared(seed)) for seed in range(40))
    assert wrong <= 2


def test_a_slower_service_is_told_by_its_sign() -> None:
    found = {d.figure.name: d for d in compared(1, slower=1.5)}
    assert found["tpot_ms p50"].called == "more" and found["tpot_ms p50"].better is False
    assert found["ttft_ms p50"].difference == pytest.approx(0.5 * found["ttft_ms p50"].a, rel=0.2)
    quicker = {d.figure.name: d for d in compared(1, slower=0.6)}
    assert quicker["ttft_ms p95"].called == "less" and quicker["ttft_ms p95"].better is True


def test_windows_that_swing_hide_what_calm_ones_show() -> None:
    """The intervals inside of the windows cannot see it: only the floor can."""
    rng = np.random.default_rng(5)
    loud = decide(see(pairs(rng, slower=1.1, spread=0.3), pairs(rng, spread=0.3), Slo()))
    assert {d.called for d in loud} == {"none"}


def test_percentiles_that_are_not_certifiable_are_left_out() -> None:
    rng = np.random.default_rng(0)
    names = {s.figure.name for s in see(pairs(rng, num=2), pairs(rng, num=2), Slo())}
    assert "ttft_ms p50" in names and "ttft_ms p95" not in names and "goodput_qps" not in names


def test_the_floor_is_students_t_of_the_pooled_variance() -> None:
    assert noise_floor([5.0, 5.0], [1.0, -1.0], 0.05) == pytest.approx(3.182446 * math.sqrt(2 / 3 / 2), rel=1e-5)
    assert noise_floor([1.0], [], 0.05) == math.inf
    assert noise_floor([1.0], [math.inf], 0.05) == math.inf


def test_unequal_windows_are_refused() -> None:
    rng = np.random.default_rng(0)
    ((a, b),) = pairs(rng, num=1)
    with pytest.raises(ValueError, match="same requests"):
        see([(a, b[1:])], [], Slo())


def test_failures_on_one_side_are_an_infinite_difference() -> None:
    rng = np.random.default_rng(0)
    made = [(a, [r if i % 2 else _failed(r) for i, r in enumerate(b)]) for a, b in pairs(rng)]
    found = {d.figure.name: d for d in decide(see(made, pairs(rng), Slo()))}
    told = found["ttft_ms p95"].as_json()
    assert told["b"] is None and "b" in told["infinite"] and told["better"] is False


def _failed(r: RequestTiming) -> RequestTiming:
    return RequestTiming(r.request_id, r.t_intended_ns, r.t_send_ns, None, r.t_end_ns, (), 20, 0, error="http_5xx")


def test_only_what_is_beyond_chance_dominates() -> None:
    assert dominates([None, True]) and dominates([True, True])
    assert not dominates([True, False]) and not dominates([None, None]) and not dominates([])
    calls: dict[tuple[int, int], list[bool | None]] = {
        (0, 1): [True, None],
        (1, 0): [False, None],
        (0, 2): [True, False],
        (2, 0): [False, True],
    }
    assert dominated_by(3, lambda i, j: calls.get((i, j), [])) == [None, 0, None]
    assert dominated_by(0, lambda i, j: []) == []


def test_a_side_that_has_no_number_at_all_is_called_either_way() -> None:
    """Where one service failed so often that its percentile is infinite."""
    figure = Figure("ttft_ms", 0.95)
    for a, b, called in ((50.0, math.inf, "more"), (math.inf, 50.0, "less")):
        change = Interval(b - a, b - a, 0.95, 12)
        (found,) = decide([Seen(figure, a, b, change, (b - a, b - a), (1.0, -1.0))])
        assert (found.called, found.better) == (called, called == "less")

"""Steady state and over-saturation on series whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from inferloop.core.units import NS_PER_S
from inferloop.measure.columns import Floats
from inferloop.measure.quantiles import quantile
from inferloop.measure.samples import collect
from inferloop.measure.saturation import over_saturated, saturation_of
from inferloop.measure.steady import Truncation, in_flight_at_sends, mser5, steady_start
from inferloop.measure.summary import summarize
from inferloop.measure.timing import Chunk, RequestTiming


def request(send_s: float, ttft_s: float, answer_s: float = 0.0, error: str | None = None) -> RequestTiming:
    send, first, end = (round(t * NS_PER_S) for t in (send_s, send_s + ttft_s, send_s + ttft_s + answer_s))
    chunks = (Chunk(first, 1), Chunk(end, 1)) if answer_s else (Chunk(first, 1),)
    return RequestTiming("r", send, send, None, end, () if error else chunks, 1, 2, error=error)


def slow_mser5(series: Floats) -> int:
    """As the definition reads."""
    means = [float(np.mean(series[i : i + 5])) for i in range(0, len(series) // 5 * 5, 5)]
    errors = []
    for d in range(len(means) // 2 + 1):
        rest = np.array(means[d:])
        errors.append(((rest - rest.mean()) ** 2).sum() / len(rest) ** 2)
    return 5 * int(np.argmin(errors))


@pytest.mark.parametrize("seed", range(20))
def test_mser5_is_what_its_definition_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    series = rng.normal(100, 10, int(rng.integers(20, 300)))
    series = series + 60 * np.exp(-np.arange(len(series)) / rng.integers(5, 40))
    assert mser5(series).index == slow_mser5(series)


def test_a_stationary_series_loses_little() -> None:
    lost = [mser5(np.random.default_rng(seed).normal(5, 1, 500)).index for seed in range(50)]
    assert np.median(lost) <= 50
    assert mser5(np.full(100, 7.0)) == Truncation(0, True)
    assert mser5(np.full(100, 1e12 + 0.1)) == Truncation(0, True)


def test_a_filling_series_loses_its_start() -> None:
    rng = np.random.default_rng(0)
    found = mser5(np.concatenate([np.linspace(0, 50, 60), 50 + rng.normal(size=400)]))
    assert found.reached
    assert 50 <= found.index <= 75


def test_a_series_that_never_settles_says_so() -> None:
    assert not mser5(np.linspace(0, 100, 200)).reached
    assert mser5([1.0] * 19) == Truncation(0, False)
    assert mser5([]) == Truncation(0, False)
    with pytest.raises(ValueError, match="finite"):
        mser5([1.0, float("inf")] * 20)


def closed_loop(num: int, num_users: int = 8) -> list[RequestTiming]:
    """Prefills of 100 ms one after another, 4 s of decode side by side; whoever ends asks again at once."""
    free_s, due, made = 0.0, [0.0] * num_users, []
    for _ in range(num):
        due.sort()
        send = due.pop(0)
        free_s = max(free_s, send) + 0.1
        made.append(request(send, free_s - send, 4.0))
        due.append(free_s + 4.0)
    return made


def test_the_first_burst_of_a_closed_loop_is_left_out() -> None:
    """The first eight wait for each other, none of the later ones does."""
    requests = closed_loop(80)
    start = steady_start(requests)
    assert start.reached
    assert 8 <= start.index <= 10
    assert start.t_ns == requests[start.index].t_send_ns
    steady = np.sort(collect("ttft_ms", requests[start.index :]).values)
    whole = np.sort(collect("ttft_ms", requests).values)
    assert quantile(steady, 0.95) == pytest.approx(100.0)
    assert quantile(whole, 0.95) == pytest.approx(400.0)
    assert quantile(whole, 0.99) == pytest.approx(800.0)
    longer = summarize(closed_loop(400), mode="burst")
    assert longer.steady_ttft_ms.p95 == pytest.approx(100.0)
    assert longer.steady.reached and longer.steady_ttft_ms.max == pytest.approx(100.0)
    assert longer.ttft_ms.max == pytest.approx(800.0)
    assert longer.as_json()["steady"]["index"] == start.index


def test_requests_that_failed_or_were_cut_off_are_in_flight() -> None:
    made = [request(0.1 * i, 0.05, 0.3, error="timeout" if i % 7 == 0 else None) for i in range(100)]
    assert list(in_flight_at_sends(made)[:6]) == [0, 1, 2, 3, 3, 3]
    start = steady_start(made)
    assert start.reached and start.index <= 15
    assert steady_start([]).t_ns is None
    assert steady_start([request(0, 1, error="timeout")] * 3).index == 0


def series(slope: float, *, noise: float = 1.0, seed: int = 0, end_s: float = 120.0) -> list[tuple[float, float]]:
    rng = np.random.default_rng(seed)
    return [(t, 50 + slope * t + noise * float(rng.normal())) for t in np.arange(0.0, end_s, 0.25)]


def test_both_must_grow() -> None:
    flat, rising = series(0.0), series(1.0)
    assert over_saturated(rising, rising, 120.0).saturated
    assert "in flight" in over_saturated(flat, rising, 120.0).reason
    assert "TTFT" in over_saturated(rising, flat, 120.0).reason
    assert not over_saturated(series(-1.0), series(-1.0), 120.0).saturated
    patient = over_saturated(rising, rising, 120.0, least_ttft_ms=2500.0)
    assert not patient.saturated and "below 2500 ms" in patient.reason


def test_only_the_window_counts() -> None:
    settled = [*series(1.0, end_s=120.0), *[(t + 120.0, 170.0 + v / 50) for t, v in series(0.0)]]
    assert over_saturated(settled, settled, 120.0).saturated
    assert not over_saturated(settled, settled, 240.0).saturated


def test_too_little_is_not_judged() -> None:
    short = series(1.0, end_s=20.0)
    assert over_saturated(short, short, 20.0).in_flight is None
    assert "30 s" in over_saturated(short, short, 20.0).reason
    assert over_saturated(short, short, 20.0, least_span_s=10.0).saturated
    assert not over_saturated((), (), 0.0).saturated


def test_a_small_drift_ends_nothing() -> None:
    drift = series(0.05, noise=0.1)
    found = over_saturated(drift, drift, 120.0)
    assert found.in_flight is not None and found.in_flight.low > 0
    assert not found.saturated


def queue(rate: float, seconds: float, seed: int) -> list[RequestTiming]:
    """Poisson arrivals at one server that needs 0.1 s each."""
    rng = np.random.default_rng(seed)
    t, free_s, made = 0.0, 0.0, []
    while t < seconds:
        t += float(rng.exponential(1 / rate))
        free_s = max(free_s, t) + 0.1
        made.append(request(t, free_s - t))
    return made


def test_queues_on_either_side_of_their_capacity() -> None:
    """Ten a second are served: 13 a second never settle, and 7 a second are never called hopeless."""
    over = [saturation_of(queue(13.0, 60.0, seed), least_ttft_ms=100.0) for seed in range(30)]
    under = [saturation_of(queue(7.0, 120.0, seed)) for seed in range(60)]
    assert sum(s.saturated for s in over) >= 29
    assert sum(s.saturated for s in under) <= 2
    assert not saturation_of([]).saturated
    early = saturation_of(queue(13.0, 60.0, 0), now_ns=10 * NS_PER_S)
    assert early.in_flight is None

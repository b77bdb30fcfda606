"""The plan is kept by absolute deadlines; on virtual time."""

from __future__ import annotations

import heapq
import random

import pytest

from inferloop.bench.pace import Pacer
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.quantiles import quantile


def walk(pacer: Pacer, *, late_ns: tuple[int, int] = (0, 0), work_ns: int = 0, seed: int = 1) -> list[tuple[int, int]]:
    """(index, sent at) of a client that always wakes late and needs `work_ns` per request."""
    rng = random.Random(seed)
    now, sent = 0, []
    while not pacer.finished:
        wake = pacer.next_wake_ns
        assert wake is not None
        now = max(now, wake) + rng.randint(*late_ns)
        for index in pacer.due(now):
            sent.append((index, now))
            now += work_ns
    return sent


def test_work_between_sends_does_not_lower_the_rate() -> None:
    pacer = Pacer([i * 5 * NS_PER_MS for i in range(10_000)], start_ns=0)
    sent = walk(pacer, work_ns=400_000)
    rate = (len(sent) - 1) * NS_PER_S / (sent[-1][1] - sent[0][1])
    assert rate == pytest.approx(200.0, rel=0.005)
    assert pacer.num_forgone == 0


def test_late_timers_release_all_that_is_due() -> None:
    pacer = Pacer([i * 200_000 for i in range(50_000)], start_ns=0)
    sent = walk(pacer, late_ns=(800_000, 1_000_000))
    assert [index for index, _ in sent] == list(range(50_000))
    assert sent[-1][1] - sent[0][1] == pytest.approx(10 * NS_PER_S, rel=0.005)
    assert max(t - index * 200_000 for index, t in sent) <= 1_000_000


def test_catching_up_after_a_stall_is_bounded_and_told() -> None:
    pacer = Pacer([i * 200_000 for i in range(50_000)], start_ns=0, max_catch_up_ns=250 * NS_PER_MS)
    now = 0
    bursts: list[int] = []
    while not pacer.finished:
        now += 3 * NS_PER_S if len(bursts) == 1000 else NS_PER_MS
        bursts.append(len(pacer.due(now)))
    assert max(bursts) <= 1_251
    (stall,) = pacer.stalls
    assert stall.num_forgone == pacer.num_forgone
    assert 13_700 <= stall.num_forgone <= 13_760
    assert stall.late_ns == pytest.approx(3 * NS_PER_S, rel=0.01)
    assert sum(bursts) + pacer.num_forgone == 50_000


def test_a_capped_client_sends_late_but_keeps_the_intended_instants() -> None:
    """10 requests per second, one in flight, 200 ms each: the backlog must be seen in the response latency."""
    pacer = Pacer([i * 100 * NS_PER_MS for i in range(50)], start_ns=0, max_in_flight=1)
    now, in_flight, service, response, delays = 0, 0, [], [], []
    running: list[tuple[int, int]] = []
    while not pacer.finished or running:
        for index in pacer.due(now, in_flight):
            in_flight += 1
            heapq.heappush(running, (now + 200 * NS_PER_MS, index))
            service.append(200)
            response.append((now + 200 * NS_PER_MS - pacer.deadline(index)) // NS_PER_MS)
            delays.append((now - pacer.deadline(index)) // NS_PER_MS)
        events = [t for t in (pacer.next_wake_ns, running[0][0] if running else None) if t is not None]
        if not events:
            break
        now = max(now, min(events))
        while running and running[0][0] <= now:
            heapq.heappop(running)
            in_flight -= 1
    assert now == 10 * NS_PER_S
    assert len(response) == 50
    assert pacer.num_forgone == 0
    assert (quantile(sorted(service), 0.5), quantile(sorted(service), 0.99)) == (200, 200)
    assert (quantile(sorted(response), 0.5), quantile(sorted(response), 0.99)) == (2600, 5100)
    assert quantile(sorted(delays), 0.99) == 4900
    assert pacer.num_capped > 0


def test_an_early_wake_sends_nothing() -> None:
    pacer = Pacer([10, 20], start_ns=100)
    assert pacer.due(109) == []
    assert pacer.due(110) == [0]
    assert pacer.next_wake_ns == 120
    assert pacer.due(500) == [1]
    assert pacer.finished

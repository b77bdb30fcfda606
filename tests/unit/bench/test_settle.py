"""What belongs to the start of a level and is not measured."""

from __future__ import annotations

import random

from inferloop.bench.points import settled_ns
from inferloop.core.units import NS_PER_MS
from inferloop.measure.timing import Chunk, RequestTiming

EVERY_NS = 10 * NS_PER_MS


def level(*waits_ms: tuple[int, float]) -> list[RequestTiming]:
    """A request every 10 ms; of each (number, TTFT in ms) one after another, with a little noise."""
    rng = random.Random(0)
    out: list[RequestTiming] = []
    for num, wait_ms in waits_ms:
        for _ in range(num):
            t = len(out) * EVERY_NS
            first = t + round(wait_ms * rng.uniform(0.9, 1.1) * NS_PER_MS)
            out.append(RequestTiming(str(len(out)), t, t, None, first, (Chunk(first, 1),), 1, 1))
    return out


def test_a_lighter_start_after_the_lead_is_not_measured() -> None:
    timings = level((60, 20.0), (800, 400.0))
    t_ns = settled_ns(timings, timings[10:], floor=143)
    assert t_ns is not None
    # What is in flight fills up for as long as an answer takes.
    assert 60 * EVERY_NS <= t_ns <= 160 * EVERY_NS


def test_a_slow_start_is_what_users_meet() -> None:
    timings = level((60, 400.0), (400, 20.0))
    assert settled_ns(timings, timings[10:], floor=143) is None


def test_no_more_than_a_quarter_is_given_up_and_no_floor() -> None:
    timings = level((200, 20.0), (300, 400.0))
    assert settled_ns(timings, timings, floor=143) is None
    timings = level((30, 20.0), (120, 400.0))
    assert settled_ns(timings, timings, floor=143) is None


def test_a_level_that_is_steady_after_its_lead_is_measured_whole() -> None:
    timings = level((20, 20.0), (400, 400.0))
    assert settled_ns(timings, timings[100:], floor=143) is None
    assert settled_ns([], [], floor=143) is None

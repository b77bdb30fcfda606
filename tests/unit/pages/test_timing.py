"""Which answers the simulator shows, and what its markup promises without a script."""

from __future__ import annotations

import json
import re

from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.pages.timing import Stream, pick_streams, timing_simulator

MS = 1_000_000


def answer(name: str, *at_ms: int) -> RequestTiming:
    chunks = tuple(Chunk((1000 + t) * MS, 2) for t in at_ms)
    return RequestTiming(name, None, 1000 * MS, None, (1000 + at_ms[-1]) * MS, chunks, 5, 2 * len(chunks))


def test_the_median_the_slow_and_the_one_with_the_longest_pause() -> None:
    rows = [answer("quick", 10, 20), answer("usual", 10, 30), answer("paused", 10, 900, 950), answer("slow", 400, 1200)]
    failed = RequestTiming("failed", None, 0, None, 5, (), 5, 0, error="timeout")
    one_chunk = answer("whole", 5000)
    assert pick_streams({"": [failed, one_chunk, *rows]}) == [
        Stream("median of TTLT", ((10.0, 2), (30.0, 2))),
        Stream("the slowest", ((400.0, 2), (1200.0, 2))),
        Stream("the longest pause", ((10.0, 2), (900.0, 2), (950.0, 2))),
    ]
    assert pick_streams({"a": [failed], "b": [one_chunk]}) == []


def test_two_runs_meet_in_the_two_lanes() -> None:
    page = timing_simulator(pick_streams({"before": [answer("a", 1, 2)], "after": [answer("b", 1, 3)]}))
    left, right = re.findall(r'data-lane="\w+"', page), re.findall(r"<option[^>]* selected>([^<]+)", page)
    assert len(left) == 2 and right == ["1 \u00d7", "before: median of TTLT", "after: median of TTLT"]


def test_a_name_cannot_end_the_data() -> None:
    page = timing_simulator([Stream("</script><b>", ((1.0, 1), (2.0, 1)))])
    assert "</script><b>" not in page
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page)
    assert data and json.loads(data[1])["streams"][0]["name"] == "</script><b>"


def test_every_control_has_a_name_that_can_be_heard() -> None:
    page = timing_simulator([Stream("a", ((1.0, 1), (2.0, 1)))])
    for control in re.findall(r"<(?:input|select)\b", page):
        assert control
    inputs = len(re.findall(r"<(?:input|select)\b", page))
    labelled = len(re.findall(r"<label>[^<]+<(?:input|select)\b", page))
    assert inputs == labelled > 10

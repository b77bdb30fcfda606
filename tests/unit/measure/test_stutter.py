from __future__ import annotations

import pytest

from inferloop.measure.stutter import stutter
from inferloop.measure.timing import Chunk, RequestTiming

MS = 1_000_000


def answer(*gaps_ms: float, error: str | None = None) -> RequestTiming:
    t_ns, chunks = 100 * MS, [Chunk(100 * MS, 1)]
    for gap in gaps_ms:
        t_ns += int(gap * MS)
        chunks.append(Chunk(t_ns, 1))
    return RequestTiming("r", 0, 0, None, t_ns, tuple(chunks), 1, len(chunks), error=error)


def test_a_bunch_of_stalls_in_one_answer_is_seen_by_one_reader() -> None:
    smooth, stalled = answer(*[20.0] * 10), answer(*[20.0] * 5, *[300.0] * 5)
    found = stutter([smooth] * 3 + [stalled])
    assert found is not None
    assert found.gap_share == 5 / 40
    assert found.num_gaps_median == 10
    assert found.expected == pytest.approx(1 - (1 - 0.125) ** 10)
    assert found.observed == 0.25


def test_failures_and_single_chunks_do_not_count() -> None:
    assert stutter([answer(900.0, error="truncated"), answer()]) is None


def test_a_gap_at_the_limit_is_no_stall() -> None:
    found = stutter([answer(250.0, 250.0)])
    assert found is not None and (found.gap_share, found.expected, found.observed) == (0.0, 0.0, 0.0)

"""The single definition of every latency, against hand-computed values."""

from __future__ import annotations

import pytest

from inferloop.measure import timing
from inferloop.measure.timing import Chunk, RequestTiming

MS = 1_000_000


def request(chunks: list[tuple[int, int]], *, send_ms: int = 0, intended_ms: int | None = 0) -> RequestTiming:
    stamps = tuple(Chunk(t * MS, n) for t, n in chunks)
    return RequestTiming(
        request_id="r",
        t_intended_ns=None if intended_ms is None else intended_ms * MS,
        t_send_ns=send_ms * MS,
        t_headers_ns=None,
        t_end_ns=(chunks[-1][0] if chunks else 0) * MS,
        chunks=stamps,
        num_input_tokens=1,
        num_output_tokens=sum(n for _, n in chunks),
    )


def test_frames_of_four_tokens_are_not_four_times_slower() -> None:
    r = request([(100, 4), (140, 4), (180, 4), (220, 4)])
    assert timing.icl_ms(r) == [40.0, 40.0, 40.0]
    assert timing.tpot_ms(r) == 10.0
    assert timing.itl_ms(r) == [10.0] * 12
    assert timing.ttft_ms(r) == 100.0
    assert timing.ttlt_ms(r) == 220.0


def test_ttft_is_not_inside_tpot() -> None:
    assert timing.tpot_ms(request([(5_000, 1), (5_010, 1)])) == 10.0


def test_response_latency_counts_from_the_intended_instant() -> None:
    r = request([(300, 1)], send_ms=200, intended_ms=0)
    assert timing.ttft_ms(r) == 100.0
    assert timing.response_ttft_ms(r) == 300.0
    assert timing.schedule_delay_ms(r) == 200.0


def test_a_closed_loop_has_no_lateness() -> None:
    r = request([(300, 1)], intended_ms=None)
    assert timing.response_ttft_ms(r) is None
    assert timing.schedule_delay_ms(r) is None


def test_no_token_is_null_never_a_number() -> None:
    r = request([])
    assert timing.ttft_ms(r) is None
    assert timing.tpot_ms(r) is None
    assert timing.ttlt_ms(r) is None
    assert timing.itl_ms(r) == []


def test_one_chunk_has_no_tpot() -> None:
    assert timing.tpot_ms(request([(100, 7)])) is None


def test_stutter_of_the_lecture() -> None:
    assert timing.stutter_probability(0.01, 200) == pytest.approx(0.866, abs=5e-4)


@pytest.mark.parametrize(("p", "num_tokens"), [(-0.1, 1), (1.1, 1), (0.5, -1)])
def test_stutter_refuses_what_is_no_probability(p: float, num_tokens: int) -> None:
    with pytest.raises(ValueError, match="p="):
        timing.stutter_probability(p, num_tokens)

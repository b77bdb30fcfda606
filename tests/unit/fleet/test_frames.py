from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.fleet.act.gateway.frames import FrameBuffer

PIECES = st.lists(
    st.binary(max_size=4) | st.sampled_from([b"\n", b"\n\n", b"\r\n\r\n", b"\r", b"data: x"]), max_size=20
)


ENDS = (b"\n\n", b"\r\n\r\n")


@given(PIECES)
def test_whole_events_go_on_at_once_and_no_half_event_does(pieces: list[bytes]) -> None:
    frames, given_in, out = FrameBuffer(), b"", b""
    for piece in pieces:
        given_in += piece
        out += frames.push(piece)
        assert not out or out.endswith(ENDS)
        assert not any(end in given_in[len(out) :] for end in ENDS)
    assert out + frames.rest() == given_in


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_split_at_any_byte_nothing_is_lost(size: int) -> None:
    text = b'data: {"a": 1}\n\n: ping\r\n\r\ndata: [DONE]\n\n'
    frames = FrameBuffer()
    assert b"".join(frames.push(text[i : i + size]) for i in range(0, len(text), size)) == text
    assert frames.rest() == b""


def test_one_endless_event_is_passed_on_rather_than_hoarded() -> None:
    frames = FrameBuffer()
    out = b"".join(frames.push(b"x" * 65536) for _ in range(40))
    assert len(out) > 1 << 20
    assert len(frames.rest()) <= 1 << 20

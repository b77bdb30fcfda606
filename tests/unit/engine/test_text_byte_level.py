"""Bytes of a byte-level vocabulary, read all at once, against one character at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferloop.engine.text.vocabulary import _byte_level, byte_level_alphabet

ALPHABET = byte_level_alphabet()
FOREIGN = ["\uffff", "\U0010ffff", " ", "\n", "\xa0", "\xad", "\x00", "\x7f", "世"]


def slowly(token: str) -> bytes:
    try:
        return bytes([ALPHABET[c] for c in token])
    except KeyError:
        return token.encode()


@given(st.lists(st.text(st.sampled_from([*ALPHABET, *FOREIGN]), max_size=6) | st.text(st.sampled_from([*ALPHABET]))))
def test_they_agree(tokens: list[str]) -> None:
    assert _byte_level(tokens) == (tuple(map(slowly, tokens)) if tokens else ())

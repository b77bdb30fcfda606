"""Chunks that are kept small are the tuple that they stand for."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.measure.chunks import Chunk, Chunks, counts_of, times_of

_PAIRS = st.lists(st.tuples(st.integers(-(2**62), 2**62), st.integers(-3, 300)), max_size=20)


@given(_PAIRS, st.slices(20))
def test_they_are_what_a_tuple_would_be(pairs: list[tuple[int, int]], some: slice) -> None:
    plain = tuple(Chunk(*pair) for pair in pairs)
    small = Chunks([t for t, _ in pairs], [n for _, n in pairs])
    assert small == plain and plain == small and hash(small) == hash(plain) and tuple(small) == plain
    assert small == Chunks(*zip(*pairs, strict=True)) if pairs else not small
    assert small[some] == plain[some] and len(small) == len(plain)
    assert all(small[i] == plain[i] and small[i - len(plain)] == plain[i] for i in range(len(plain)))
    assert pickle.loads(pickle.dumps(small)) == small
    for chunks in (small, plain):
        assert list(times_of(chunks)) == [c.t_ns for c in plain]
        assert list(counts_of(chunks)) == [c.num_tokens for c in plain]


def test_others_are_not_equal() -> None:
    small = Chunks([5, 7], [1, 2])
    assert small != Chunks([5, 7], [1, 3]) and small != Chunks([5, 8], [1, 2]) and small != (Chunk(5, 1),)
    assert Chunks([5], [1]) != [Chunk(5, 1)] and Chunks([5], [300]) != Chunks([5], [44])
    with pytest.raises(IndexError):
        small[2]
    with pytest.raises(ValueError, match="2 times and 1 counts"):
        Chunks([5, 7], [1])

"""Assembling text from tokens, however they came grouped, against looking at the whole text after every token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferloop.backends import bytecodec
from inferloop.backends.assemble import Assembler
from inferloop.core.request import Sampling
from inferloop.engine.schedule.step import TokenLogprob

TEXTS = st.text(alphabet="abAB é삼👩", min_size=1, max_size=30)
STOPS = st.lists(st.text(alphabet="abAB é삼👩", min_size=1, max_size=4), max_size=3)


def truth(ids: list[int], stops: list[str], min_tokens: int) -> tuple[str, int, bool]:
    """(text, tokens that count, whether a stop ended it): the text is decoded anew after each token."""
    start = len(decoded(ids[: max(0, min_tokens - 1)]))  # what was shown before stops count cannot be part of one
    for n in range(max(1, min_tokens), len(ids) + 1):
        text = decoded(ids[:n])
        ends = [(text.index(s, start) + len(s), -len(s)) for s in stops if s in text[start:]]
        if ends:
            end, minus_length = min(ends)
            return text[: end + minus_length], n, True
    return bytecodec.decode(ids), len(ids), False


def decoded(ids: list[int]) -> str:
    """Complete characters only."""
    return bytecodec.ByteDecoder().push(ids)


@given(TEXTS, STOPS, st.integers(0, 12), st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_grouping_changes_nothing(text: str, stops: list[str], min_tokens: int, sizes: list[int]) -> None:
    ids = list(text.encode())
    expected, num, stopped = truth(ids, stops, min_tokens)
    assembler = Assembler(bytecodec.ByteDecoder(), Sampling(stop=tuple(stops), min_tokens=min_tokens))
    shown, counted, logprobs = "", list[int](), list[TokenLogprob]()
    at, stop = 0, None
    while at < len(ids) and stop is None:
        size = sizes[at % len(sizes)]
        group = ids[at : at + size]
        piece = assembler.push(group, tuple(TokenLogprob(-float(i), ()) for i in group))
        assert piece.logprobs is not None and len(piece.logprobs) == len(piece.token_ids)
        shown, stop, at = shown + piece.text, piece.stop, at + size
        counted += piece.token_ids
        logprobs += piece.logprobs
        assert expected.startswith(shown)
    if stop is None:
        rest, stop = assembler.flush()
        shown += rest
    assert (shown, len(counted), stop is not None) == (expected, num, stopped)
    assert [lp.chosen for lp in logprobs] == [-float(i) for i in ids[:num]]


def test_the_last_token_can_be_hidden() -> None:
    assembler = Assembler(bytecodec.ByteDecoder(), Sampling())
    piece = assembler.push(tuple(b"abc"), hide_last=True)
    assert (piece.text, piece.token_ids, piece.stop) == ("ab", tuple(b"abc"), None)


def test_an_unfinished_character_is_flushed_once() -> None:
    assembler = Assembler(bytecodec.ByteDecoder(), Sampling(stop=("z",)))
    assert assembler.push("é".encode()[:1]).text == ""
    assert assembler.flush() == ("�", None)

"""The incremental detokenizer against decoding everything at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from inferloop.engine.text.detokenizer import Detokenizer
from inferloop.engine.text.tokenizer import Tokenizer, load_tokenizer
from inferloop.models.resolve import ModelFiles

MIXED = "삼겹살 김치 👩‍👩‍👧‍👦 ñandú e\u0301 世a界 世ab \U0001f468\u200d\U0001f4bb مرحبا हिन्दी ไทย \u202e\n\t  end"
RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece", "sentencepiece-no-prefix"])
def tokenizer(
    request: pytest.FixtureRequest, embedded_model: ModelFiles, sentence_pieces: Callable[..., Any]
) -> Tokenizer:
    if request.param == "byte-level":
        return load_tokenizer(embedded_model)
    return load_tokenizer(sentence_pieces(prefix=request.param == "sentencepiece").files)


def is_byte_level(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer._inner.decoder, decoders.ByteLevel)


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def stream(tokenizer: Tokenizer, pieces: list[list[int]]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push(piece) for piece in pieces]
    return deltas, detokenizer.flush()


@given(numbers=st.lists(st.integers(0, 49_151), max_size=40), cuts=st.lists(st.integers(0, 1000), max_size=40))
@RELAXED
def test_deltas_of_random_ids_join_to_the_full_decode(
    tokenizer: Tokenizer, numbers: list[int], cuts: list[int]
) -> None:
    ids = [i % tokenizer.vocab_size for i in numbers]
    deltas, rest = stream(tokenizer, cut(ids, cuts))
    assert "".join(deltas) + rest == tokenizer.decode(ids)


@given(prompt=st.lists(st.integers(0, 49_151), max_size=6), answer=st.lists(st.integers(0, 49_151), max_size=12))
@RELAXED
def test_prompt_and_answer_join_to_the_decode_of_all_ids(
    tokenizer: Tokenizer, prompt: list[int], answer: list[int]
) -> None:
    """Also the space that a SentencePiece vocabulary writes before the first word: it begins the whole text only."""
    prompt, answer = ([i % tokenizer.vocab_size for i in ids] for ids in (prompt, answer))
    assume(
        tokenizer.vocabulary.bytes_of(prompt).decode("utf-8", "ignore").encode()
        == tokenizer.vocabulary.bytes_of(prompt)
    )
    detokenizer = Detokenizer(tokenizer, after=prompt)
    text = detokenizer.push(answer) + detokenizer.flush()
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *answer])


def test_an_answer_keeps_its_first_space_after_a_prompt_and_has_none_at_the_start(
    sentence_pieces: Callable[..., Any],
) -> None:
    tokenizer = load_tokenizer(sentence_pieces(prefix=True).files)
    prompt, answer = tokenizer.encode("the", allow_special=False), tokenizer.encode("in", allow_special=False)
    assert tokenizer.token_bytes(answer[0]).startswith(b" ")
    assert Detokenizer(tokenizer, after=[1, *prompt]).push(answer) == " in"
    assert Detokenizer(tokenizer, after=[1]).push(answer) == "in"


@given(numbers=st.lists(st.integers(0, 49_151), max_size=40))
@RELAXED
def test_our_decode_is_the_decode_of_the_tokenizers_library(tokenizer: Tokenizer, numbers: list[int]) -> None:
    """Of broken bytes the two make different numbers of U+FFFD in a SentencePiece vocabulary."""
    ids = [i % tokenizer.vocab_size for i in numbers]
    for skip in (True, False):
        ours, theirs = tokenizer.decode(ids, skip_special=skip), tokenizer._inner.decode(ids, skip_special_tokens=skip)
        assert ours == theirs or ("\ufffd" in ours and not is_byte_level(tokenizer))


@given(data=st.data(), num=st.integers(1, 40))
@RELAXED
def test_ids_of_raw_bytes_join_to_the_full_decode(tokenizer: Tokenizer, data: st.DataObject, num: int) -> None:
    """Every id a single byte: the hardest case, with broken, overlong and surrogate sequences."""
    single = [i for i, b in enumerate(tokenizer.vocabulary.token_bytes) if len(b) == 1]
    high = [i for i in single if tokenizer.vocabulary.token_bytes[i][0] >= 0x80]
    ids = data.draw(st.lists(st.sampled_from(high + single[:5]), min_size=num, max_size=num))
    cuts = data.draw(st.lists(st.integers(0, num), max_size=num))
    deltas, rest = stream(tokenizer, cut(ids, cuts))
    assert "".join(deltas) + rest == tokenizer.decode(ids)
    if is_byte_level(tokenizer):
        assert tokenizer.decode(ids) == tokenizer._inner.decode(ids)


@given(text=st.lists(st.sampled_from(MIXED), max_size=30).map("".join), cuts=st.lists(st.integers(0, 500), max_size=60))
@RELAXED
def test_mixed_scripts_come_back_whole(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    deltas, rest = stream(tokenizer, cut(ids, cuts))
    assert "".join(deltas) + rest == text
    assert rest == ""


def test_one_id_at_a_time_shows_no_replacement_and_repeats_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(MIXED, allow_special=False)
    deltas, rest = stream(tokenizer, [[i] for i in ids])
    assert not any("\ufffd" in delta for delta in deltas)
    assert ("".join(deltas), rest) == (MIXED, "")


def test_a_character_cut_by_the_length_limit_is_flushed_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a龘", allow_special=False)
    assert len(tokenizer.vocabulary.token_bytes[ids[-1]]) < 3, "the last character must span several ids"
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""

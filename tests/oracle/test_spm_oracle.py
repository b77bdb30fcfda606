"""SentencePiece vocabularies rebuilt from GGUF keys against the sentencepiece package itself."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferloop.engine.text.gguf_tokenizer import build_from_gguf
from inferloop.engine.text.tokenizer import Tokenizer, load_tokenizer

RELAXED = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
USER_DEFINED = ("<tool>", "▁▁", "▁▁▁▁", "\n\n")
SNIPPETS = ["the", " baroto", "ing", '{"name": "', '": [1, 2.5, true]}', " ", "  ", "   ", "\n", "\n\n\n", "\t", "▁"]
SNIPPETS += ["世界", "삼", "👩\u200d👩", "e\u0301", "\u00a0", "\ufeff", "\0", "\u202e", "é", "q"]
SNIPPETS += ["<tool>", "<end>", "<s>", "<unk>", "<0x41>"]
TEXTS = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(SNIPPETS), max_size=25).map("".join))
Twin = tuple[Tokenizer, Any]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def twin(request: pytest.FixtureRequest, sentence_pieces: Callable[..., Any]) -> Twin:
    """No user-defined tokens where a space is put in front: for us they cut a text, for sentencepiece they do not."""
    made = sentence_pieces(prefix=request.param, user_defined=() if request.param else USER_DEFINED)
    return load_tokenizer(made.files), made.theirs


@given(text=TEXTS)
@RELAXED
def test_ids_and_text_equal_theirs(twin: Twin, text: str) -> None:
    """Control tokens in a text are spelled out, as sentencepiece does with all text."""
    ours, theirs = twin
    ids = ours.encode(text, allow_special=False)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids) == text.replace("▁", " ")
    assert ours.least_tokens(text) <= len(ids)


def test_the_mark_for_a_space_written_in_a_text_counts_as_the_space_that_it_becomes(twin: Twin) -> None:
    """Three bytes of the text, one of the token that it becomes a part of."""
    ours, _ = twin
    longest = max(ours.vocabulary.token_bytes, key=len)
    text = longest.decode().replace(" ", "▁") * 50
    assert ours.least_tokens(text) <= len(ours.encode(text, allow_special=False))
    assert ours.least_tokens("▁" * 500) <= len(ours.encode("▁" * 500, allow_special=False))


@given(parts=st.lists(st.one_of(TEXTS, st.sampled_from(["<s>", "</s>", "<end>", "<unk>"])), max_size=6))
@RELAXED
def test_control_tokens_cut_a_text_whose_parts_equal_theirs(twin: Twin, parts: list[str]) -> None:
    ours, theirs = twin
    text = "".join(parts)
    expected: list[int] = []
    for part in re.split("(</?s>|<end>|<unk>)", text):
        special = re.fullmatch("</?s>|<end>|<unk>", part)
        expected += [theirs.piece_to_id(part)] if special else theirs.encode(part)
    assert ours.encode(text, allow_special=True) == expected


@given(data=st.data())
@RELAXED
def test_the_text_of_random_ids_equals_theirs(twin: Twin, data: st.DataObject) -> None:
    """Without bytes: broken characters have as many U+FFFD as each library sees fit."""
    ours, theirs = twin
    whole = [i for i in range(theirs.get_piece_size()) if not theirs.is_byte(i) and not theirs.is_unknown(i)]
    ids = data.draw(st.lists(st.sampled_from(whole), max_size=20))
    assert ours.decode(ids) == theirs.decode(ids)


def test_every_token_has_the_bytes_that_it_stands_for(twin: Twin) -> None:
    ours, theirs = twin
    for i in range(theirs.get_piece_size()):
        piece = theirs.id_to_piece(i)
        byte = bytes([int(piece[3:5], 16)]) if theirs.is_byte(i) else None
        assert ours.token_bytes(i) == (byte or piece.replace("▁", " ").encode())


@pytest.mark.parametrize("seed", range(40))
def test_random_vocabularies_merge_as_theirs(seed: int) -> None:
    """Few letters, many overlapping pieces, scores in any order, one of them user-defined: where merging is hardest."""
    rng = random.Random(seed)
    letters = rng.choice(["ab", "a▁", "ab▁", "abc▁é"])
    pool = list(letters)
    for _ in range(rng.randrange(3, 40)):
        pool.append((rng.choice(pool) + rng.choice(pool))[:8])
    pieces = sorted(p for p in set(pool) if all(c in letters for c in p))
    rng.shuffle(pieces)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-float(s) for s in rng.sample(range(1000), len(pieces))]
    prefix = rng.random() < 0.5
    if not prefix:
        types[259 + rng.randrange(len(pieces))] = 4
    theirs = processor(tokens, scores, types, prefix)
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "add_space_prefix": prefix}
    inner, _ = build_from_gguf({f"tokenizer.ggml.{k}": v for k, v in keys.items()}, Path("random.gguf"))
    for _ in range(150):
        text = "".join(rng.choices(letters + " z", k=rng.randrange(40)))
        assert inner.encode(text, add_special_tokens=False).ids == theirs.encode(text), repr(text)


def processor(tokens: list[str], scores: list[float], types: list[int], prefix: bool) -> Any:
    """sentencepiece on a model that nobody trained, written in the format of its `sentencepiece_model.proto`."""
    out = b""
    for token, score, kind in zip(tokens, scores, types, strict=True):
        out += block(1, block(1, token.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + number(3, kind))
    out += block(2, number(3, 2) + number(35, 1))  # trainer_spec: model_type BPE, byte_fallback
    out += block(3, block(1, b"identity") + number(3, prefix) + number(4, 0))  # normalizer_spec: prefix, keep blanks
    return sentencepiece.SentencePieceProcessor(model_proto=out)


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(int(value))


def block(field: int, payload: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(payload)) + payload

"""Encoding against slow, obvious byte-pair merging over the same vocabulary."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferloop.engine.text.gguf_tokenizer import build_from_gguf
from inferloop.engine.text.tokenizer import Tokenizer, load_tokenizer
from inferloop.engine.text.vocabulary import byte_level_alphabet, read_vocabulary
from inferloop.models.resolve import ModelFiles

RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
GPT2_WORDS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
TEXTS = [
    "Hello, world! It's 3.14159 or 2,718,281 — isn't it?",
    "def f(x):\n    return x ** 2  # ² and ½\n\n\tif x:\n\t\tpass",
    "世界\uff0c你好。日本語のテキスト 삼겹살 김치",
    "👩‍👩‍👧‍👦 ñandú e\u0301 \U0001f1f3\U0001f1f4 ٣٤٥ ①②",
    "   leading,   inner\u00a0and trailing   \n\n\n   ",
    " ",
    "\r\n\r\n  x",
    "a" * 300,
    "<|im_end|> typed by a user",
]


def merge_slowly(word: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Join the best-ranked neighbours, leftmost first, until none has a rank."""
    while True:
        ranked = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(word)) if pair in ranks]
        if not ranked:
            return word
        _, i = min(ranked)
        word = [*word[:i], word[i] + word[i + 1], *word[i + 2 :]]


class SlowSmolLm:
    """Digits alone, then GPT-2's words, then merges: written from the description, not from the library."""

    def __init__(self, metadata: Any) -> None:
        self.ids = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = [tuple(m.split(" ", 1)) for m in metadata["tokenizer.ggml.merges"]]
        self.ranks: dict[tuple[str, str], int] = {(a, b): i for i, (a, b) in enumerate(merges)}
        self.shown = {b: c for c, b in byte_level_alphabet().items()}

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        for piece in regex.findall(r"\p{N}|\P{N}+", text):
            for word in GPT2_WORDS.findall(piece):
                symbols = merge_slowly([self.shown[b] for b in word.encode()], self.ranks)
                out += [self.ids[s] for s in symbols if s in self.ids]
        return out


@pytest.fixture(scope="module")
def tokenizer(embedded_model: ModelFiles) -> Tokenizer:
    return load_tokenizer(embedded_model)


@pytest.fixture(scope="module")
def slow(embedded_model: ModelFiles) -> SlowSmolLm:
    return SlowSmolLm(embedded_model.header.metadata)


@pytest.mark.parametrize("text", TEXTS)
def test_varied_texts_encode_as_the_slow_merging_does(tokenizer: Tokenizer, slow: SlowSmolLm, text: str) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    assert ids == slow.encode(text)
    assert tokenizer.decode(ids) == text


@given(text=st.text(max_size=60))
@RELAXED
def test_random_texts_encode_as_the_slow_merging_does(tokenizer: Tokenizer, slow: SlowSmolLm, text: str) -> None:
    unassigned = regex.search(r"\p{Cn}|\p{Co}", text)  # libraries know different Unicode versions
    if not unassigned:
        assert tokenizer.encode(text, allow_special=False) == slow.encode(text)


SPM_PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "aa", "▁abc", "cab", "▁▁"]


def spm_metadata(*, prefix: bool) -> dict[str, object]:
    """A vocabulary like Llama-2's: unknown, control, 256 byte tokens, then pieces, the longest scored best."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *SPM_PIECES]
    order = sorted(SPM_PIECES, key=lambda p: (-len(p), p))
    scores = [0.0] * 259 + [-float(order.index(p)) for p in SPM_PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(SPM_PIECES)],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def encode_spm_slowly(metadata: Any, text: str) -> list[int]:
    """SentencePiece BPE: join the neighbours whose joined piece scores best, leftmost first; unknown characters are
    spelled in bytes."""
    ids = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
    score = {t: metadata["tokenizer.ggml.scores"][ids[t]] for t in SPM_PIECES}
    marked = text.replace(" ", "▁")
    symbols = list("▁" + marked if metadata["tokenizer.ggml.add_space_prefix"] else marked) if text else []
    while True:
        joined = [a + b for a, b in itertools.pairwise(symbols)]
        ranked = [(-score[piece], i) for i, piece in enumerate(joined) if piece in score]
        if not ranked:
            break
        _, i = min(ranked)
        symbols[i : i + 2] = [joined[i]]
    out: list[int] = []
    for symbol in symbols:
        out += [ids[symbol]] if symbol in ids else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    return out


@pytest.mark.parametrize("prefix", [True, False])
@given(text=st.text(alphabet="abc é世\n", max_size=16))
@RELAXED
def test_sentence_piece_vocabularies_encode_and_decode_exactly(prefix: bool, text: str) -> None:
    metadata = spm_metadata(prefix=prefix)
    inner, adds_bos = build_from_gguf(metadata, Path("tiny.gguf"))
    ids = inner.encode(text, add_special_tokens=False).ids
    assert ids == encode_spm_slowly(metadata, text)
    vocabulary = read_vocabulary(inner, len(SPM_PIECES) + 259)
    decoded = vocabulary.bytes_of(ids).decode()
    assert (decoded.removeprefix(" ") if vocabulary.strips_leading_space else decoded) == text
    assert inner.decode(ids) == text
    assert adds_bos

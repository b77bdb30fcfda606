"""Vocabularies inside GGUF files: what is rebuilt, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from inferloop.core.errors import ModelFileError
from inferloop.engine.text.gguf_tokenizer import build_from_gguf
from inferloop.engine.text.vocabulary import byte_level_alphabet

FILE = Path("tiny.gguf")
TOKENS = [*byte_level_alphabet(), "12", "ab", "<end>", "<tool>", "\u0120", "it"][:-2]

TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of Mistral Nemo's tokenizer.json."""


def metadata(**changes: Any) -> dict[str, object]:
    base = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": [1] * (len(TOKENS) - 2) + [3, 4],
        "merges": ["1 2", "a b"],
    }
    return {f"tokenizer.ggml.{k}": v for k, v in {**base, **changes}.items() if v is not None}


def pieces(text: str, **changes: Any) -> list[str]:
    inner, _ = build_from_gguf(metadata(**changes), FILE)
    tokens: list[str] = inner.encode(text, add_special_tokens=False).tokens
    return tokens


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", ["12", "3"]),
        ("default", ["12", "3"]),
        ("smollm", ["1", "2", "3"]),
        ("qwen2", ["1", "2", "3"]),
        ("llama-bpe", ["12", "3"]),
        ("llama3", ["12", "3"]),
        ("tekken", ["1", "2", "3"]),
    ],
)
def test_each_kind_cuts_digits_its_own_way(pre: str, cut: list[str]) -> None:
    assert pieces("123", pre=pre) == cut


@pytest.mark.parametrize(
    "text", ["camelCaseHTTPServer don't /usr/bin//\n\n  x", "ÀÉîö Ñandú 삼겹살 \u0301a", "a/b/\r\n/c 12,345.6 \t\n "]
)
def test_words_of_tekken_are_those_of_its_tokenizer_json(text: str) -> None:
    cutter = pre_tokenizers.Split(Regex(TEKKEN), "isolated")
    inner, _ = build_from_gguf(metadata(pre="tekken"), FILE)
    assert inner.pre_tokenizer is not None
    ours = [part for part, _ in inner.pre_tokenizer.pre_tokenize_str(text)]
    spelled = {b: c for c, b in byte_level_alphabet().items()}
    assert ours == ["".join(spelled[b] for b in part.encode()) for part, _ in cutter.pre_tokenize_str(text)]


def test_control_and_user_defined_tokens_are_kept_whole() -> None:
    assert pieces("ab<end><tool>") == ["ab", "<end>", "<tool>"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "bert"),
        ({"model": "t5"}, "Unigram"),
        ({"model": None}, "None"),
        ({"pre": "mystery"}, "mystery"),
        ({"pre": None}, "pre"),
        ({"tokens": None}, "tokens"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"token_type": [1]}, "token_type"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "'a'"),
        ({"merges": ["ab"]}, "ab"),
        ({"merges": ["a zz"]}, "a zz"),
        ({"merges": None}, "merges"),
        ({"model": "llama"}, "scores"),
        ({"model": "llama", "scores": [0.0] * len(TOKENS)}, "byte tokens"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError, match=r"tiny\.gguf") as caught:
        build_from_gguf(metadata(**changes), FILE)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "adds"),
    [
        ({}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "tekken"}, True),
        ({"add_bos_token": True}, True),
        ({"add_bos_token": False}, False),
    ],
)
def test_bos_is_added_where_the_file_or_its_kind_says_so(changes: dict[str, Any], adds: bool) -> None:
    assert build_from_gguf(metadata(**changes), FILE)[1] is adds


BYTES = [f"<0x{b:02X}>" for b in range(256)]


def spm(pieces: list[str], types: list[int] | None = None, **changes: Any) -> dict[str, object]:
    tokens = ["<unk>", *BYTES, *pieces]
    kinds = [2] + [6] * 256 + (types or [1] * len(pieces))
    scores = [-float(i) for i in range(len(tokens))]
    return metadata(
        **{"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "merges": None, **changes}
    )


def test_sentence_pieces_merge_by_score() -> None:
    inner, adds_bos = build_from_gguf(spm(["bc", "ab", "a", "b", "c", "▁"]), FILE)
    assert inner.encode("abc bcd").tokens == ["▁", "a", "bc", "▁", "bc", "<0x64>"]
    assert adds_bos


@pytest.mark.parametrize(
    ("pieces", "types", "changes", "named"),
    [
        (["ab", "b"], None, {}, "'a'"),
        (["ab", "a", "b"], [5, 1, 1], {}, "'ab'"),
        (["ab", "bb", "a", "b"], None, {"scores": [0.0] * 261}, "same score"),
        (["ab", "a", "b"], None, {"scores": [0.0]}, "scores"),
        (["x" * 2000], None, {}, "2000"),
        (["a b"], [4], {}, "'a b'"),
        (["a▁b"], [4], {}, "'a▁b'"),
        (["a"], None, {"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        (["a"], None, {"precompiled_charsmap": [1, 2]}, "precompiled_charsmap"),
    ],
)
def test_sentence_pieces_that_cannot_be_exact_are_refused(
    pieces: list[str], types: list[int] | None, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelFileError, match=r"tiny\.gguf") as caught:
        build_from_gguf(spm(pieces, types, **changes), FILE)
    assert named in str(caught.value)


def test_unused_pieces_and_user_defined_letters_that_no_merge_reaches_do_no_harm() -> None:
    inner, _ = build_from_gguf(spm(["[PAD1]", "ab", "a", "b"], [5, 1, 4, 1]), FILE)
    assert inner.encode("ab", add_special_tokens=False).tokens[:1] == ["a"]

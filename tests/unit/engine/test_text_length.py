"""A bound that is never above the truth, so that nobody is refused who fits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from inferloop.core.errors import ContextLengthError
from inferloop.engine.text.codec import Codec
from inferloop.engine.text.length import LengthBound
from inferloop.engine.text.tokenizer import load_tokenizer
from inferloop.engine.text.vocabulary import byte_level_alphabet, read_vocabulary
from inferloop.models.resolve import ModelFiles

PIECES = [
    "a",
    "word ",
    " " * 9,
    "\n",
    "1",
    "世界",
    "é",
    "e\u0301",
    "\U0001f468\u200d\U0001f469",
    "\U00040000",
    "\ud800",
]
PIECES += ["<|im_end|>", "\u1112\u1161\u11ab", "ж" * 5]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


@pytest.fixture(scope="module")
def codec(embedded_model: ModelFiles) -> Codec:
    return Codec(embedded_model)


@given(text=TEXTS.map(lambda text: text.replace("\ud800", "")))
@settings(max_examples=300)
def test_the_embedded_model_is_never_overrated(codec: Codec, text: str) -> None:
    assert codec.tokenizer.least_tokens(text) <= len(codec.tokenizer.encode(text, allow_special=True))


def byte_level(
    *, normalizer: normalizers.Normalizer | None = None, added: list[AddedToken] | None = None, drop: int = 0
) -> Tokenizer:
    """Every byte a token, but for the last `drop` ones, and a few words."""
    alphabet = sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)[: 256 - drop]
    vocab = {token: i for i, token in enumerate([*alphabet, "aa", "aaaa"])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "a"), ("aa", "aa")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.add_tokens(added or [])
    return inner


@pytest.mark.parametrize("inner", [byte_level(), byte_level(normalizer=normalizers.NFC()), byte_level(drop=70)])
@given(text=TEXTS.map(lambda text: text.replace("\ud800", "")))
@settings(max_examples=150)
def test_bytes_that_vanish_and_marks_that_merge_do_not_count(inner: Tokenizer, text: str) -> None:
    bound = LengthBound(inner, read_vocabulary(inner, 1000))
    assert bound.bytes_per_token in (4, 12)
    assert bound.least_tokens(text) <= len(inner.encode(text).ids)


def test_it_says_something_and_takes_surrogates() -> None:
    inner = byte_level()
    bound = LengthBound(inner, read_vocabulary(inner, 1000))
    assert bound.least_tokens("a" * 100) == 25 == len(inner.encode("a" * 100).ids)
    assert bound.least_tokens("a\ud800") == 1
    assert bound.least_tokens("") == 0


def test_nothing_is_known_of_a_tokenizer_that_swallows_text() -> None:
    greedy = byte_level(added=[AddedToken("<x>", rstrip=True)])
    assert len(greedy.encode("<x>" + " " * 1000).ids) == 1
    for inner in (greedy, byte_level(normalizer=normalizers.Sequence([normalizers.Strip(), normalizers.NFC()]))):
        assert LengthBound(inner, read_vocabulary(inner, 1000)).least_tokens(" " * 1000) == 0


@pytest.mark.parametrize("chat", [False, True])
def test_what_can_never_fit_is_not_cut_into_tokens(codec: Codec, monkeypatch: pytest.MonkeyPatch, chat: bool) -> None:
    tokenizer = codec.tokenizer
    limit = 100
    texts = {n: "x" * n for n in (50, 1_000_000)}

    def encode(text: str) -> tuple[int, ...]:
        if chat:
            return codec.encode_chat([{"role": "user", "content": text}], max_tokens=limit)
        return codec.encode_text(text, max_tokens=limit)

    assert encode(texts[50])
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_, **__: pytest.fail("tokenized"))
    with pytest.raises(ContextLengthError) as caught:
        encode(texts[1_000_000])
    assert caught.value.param == ("messages" if chat else "prompt")


def test_the_bound_is_that_of_the_file(embedded_model: ModelFiles) -> None:
    tokenizer = load_tokenizer(embedded_model)
    longest = max(map(len, tokenizer.vocabulary.token_bytes))
    assert tokenizer.least_tokens("x" * longest * 7) == 7
    assert tokenizer.least_tokens("x" * (longest * 7 + 1)) == 8

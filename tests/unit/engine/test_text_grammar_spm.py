"""Structured output with a SentencePiece vocabulary: its tokens carry spaces, and single bytes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from inferloop.core.request import Grammar
from inferloop.engine.text.codec import Codec
from inferloop.engine.text.grammar import GrammarMask

EOS = 2
OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "list": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "list"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def codec(request: pytest.FixtureRequest, sentence_pieces: Callable[..., Any]) -> Codec:
    return Codec(sentence_pieces(prefix=request.param).files)


def allowed(codec: Codec, mask: GrammarMask) -> list[int]:
    row = np.full((codec.tokenizer.vocab_size + 31) // 32, 0xFFFF_FFFF, np.uint32)
    mask.fill(row)
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found


def sampled(codec: Codec, grammar: Grammar, rng: random.Random, max_tokens: int) -> str | None:
    """The text of a random walk through what is allowed; None when it had not ended after so many tokens."""
    mask, ids = codec.compile_grammar(grammar), list[int]()
    while len(ids) < max_tokens:
        choice = rng.choice(allowed(codec, mask))
        mask.accept([choice])
        assert not mask.failed
        if choice == EOS:
            return b"".join(map(codec.token_bytes, ids)).decode()
        ids.append(choice)
    return None


def takes(codec: Codec, grammar: Grammar, tokens: list[int]) -> bool:
    """Whether the tokens can be followed, and the answer end there."""
    mask = codec.compile_grammar(grammar)
    mask.accept(tokens)
    return not mask.failed and EOS in allowed(codec, mask)


def test_whatever_is_sampled_under_a_schema_is_valid_json_of_it(codec: Codec) -> None:
    rng, grammar = random.Random(3), Grammar("json_schema", json.dumps(OBJECT))
    found = [text for _ in range(40) if (text := sampled(codec, grammar, rng, 200)) is not None]
    assert len(found) > 20
    for text in found:
        value = json.loads(text)
        assert list(value) == ["name", "list"] and len(value["name"]) <= 12
        assert all(type(n) is int for n in value["list"])
    assert any(not text.isascii() for text in found), "byte tokens joined to characters"


@pytest.mark.parametrize("expression", ["the in+", "baro(to|st)?", " ing", "世界 [0-9]{2}", "(the )*in"])
def test_whatever_is_sampled_under_an_expression_matches_from_its_first_byte(codec: Codec, expression: str) -> None:
    """A forced beginning too: the space before a first word is not slipped in."""
    rng = random.Random(4)
    found = [text for _ in range(20) if (text := sampled(codec, Grammar("regex", expression), rng, 60)) is not None]
    assert found and all(re.fullmatch(expression, text) for text in found), found


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"name": "the é世", "list": [1, 25]}', True),
        ('{"name":"a\\n","list":[]}', True),
        ('{"name": "the", "list": [1.5]}', False),
        ('{"list": [], "name": ""}', False),
        (' {"name": "", "list": []}', False),
        ('{"name": "", "list": []', False),
    ],
)
def test_a_schema_takes_exactly_its_texts_byte_by_byte(codec: Codec, text: str, ok: bool) -> None:
    single = {codec.token_bytes(i): i for i in range(3, 259)}
    tokens = [single[bytes([b])] for b in text.encode()]
    assert takes(codec, Grammar("json_schema", json.dumps(OBJECT)), tokens) is ok

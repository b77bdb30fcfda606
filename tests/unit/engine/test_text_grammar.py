"""Grammars compiled for a real vocabulary."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from inferloop.core.errors import RequestError
from inferloop.core.request import Grammar, GrammarKind
from inferloop.engine.text import grammar as grammar_module
from inferloop.engine.text.codec import Codec
from inferloop.engine.text.depth import MAX_DEPTH
from inferloop.engine.text.grammar import MAX_CHARS, GrammarCompiler, GrammarMask
from inferloop.models.resolve import ModelFiles

PARAM = "response_format.json_schema.schema"


@pytest.fixture(scope="module")
def codec(embedded_model: ModelFiles) -> Codec:
    return Codec(embedded_model)


def allowed(codec: Codec, mask: GrammarMask) -> set[int]:
    row = np.full((codec.tokenizer.vocab_size + 31) // 32, 0xFFFF_FFFF, np.uint32)
    mask.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def takes(codec: Codec, grammar: Grammar, text: str) -> bool:
    """Whether sampling under the mask could give exactly this text and end."""
    mask = codec.compile_grammar(grammar)
    for token in [*codec.tokenizer.encode(text, allow_special=False), codec.tokenizer.eos_token_ids[0]]:
        if token not in allowed(codec, mask):
            return False
        mask.accept([token])
        assert not mask.failed
    return True


def test_the_end_token_is_allowed_exactly_where_the_grammar_may_end(codec: Codec) -> None:
    mask = codec.compile_grammar(Grammar("regex", "[0-9]{2,3}"))
    end = codec.tokenizer.eos_token_ids[0]
    seen = []
    for digit in "123":
        now = allowed(codec, mask)
        seen.append(end in now)
        assert now - {end} == {codec.tokenizer.encode(d, allow_special=False)[0] for d in "0123456789"}
        mask.accept(codec.tokenizer.encode(digit, allow_special=False))
    assert seen == [False, False, True]
    assert allowed(codec, mask) == {end}


def test_control_tokens_are_no_text(codec: Codec) -> None:
    mask = codec.compile_grammar(Grammar("json_schema", '{"type": "string"}'))
    mask.accept(codec.tokenizer.encode('"a', allow_special=False))
    now = allowed(codec, mask)
    assert len(now) > 10_000 and not now & codec.tokenizer.vocabulary.special


def test_an_answer_may_end_before_its_grammar_must(codec: Codec) -> None:
    grammar = Grammar("regex", "[0-9]{2,3}")
    assert [takes(codec, grammar, text) for text in ("1", "12", "123", "1234")] == [False, True, True, False]


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"a": 1}', True),
        ('{"a":1}', True),
        ('{\n  "a": [\n    1\n  ]\n}', True),
        ('{"a": "  any   blanks inside of a string  "}', True),
        ("[1]", False),
        ('{"a": 1', False),
        ('{   "a": 1}', False),
        ('{"a": 1' + " " * 50 + "}", False),
        ('{"a": 1' + "\n" * 5 + "}", False),
        ('{"a": 1}' + "\n" * 5, False),
    ],
)
def test_any_object_with_bounded_white_space(codec: Codec, text: str, ok: bool) -> None:
    assert takes(codec, Grammar("json_object"), text) is ok


def test_a_schema_cannot_loosen_the_rules(codec: Codec) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": " *", "lenient": True}}
    assert not takes(codec, Grammar("json_schema", json.dumps(schema)), '{      "a": 1}')
    with pytest.raises(RequestError):
        codec.compile_grammar(Grammar("json_schema", json.dumps({**schema, "not": {}})))


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", '{"type": "nope"}', "nope"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "string", "format": "frob"}', "frob"),
        ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-ahead"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "minLength"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "example.com"),
        ("json_schema", '{"$ref": "#"}', ""),
        ("json_schema", '{"type":', "not JSON"),
        ("json_schema", "[]", "object"),
        ("json_schema", '{"enum": ["\\ud800"]}', "hex escape"),
        ("json_schema", '{"const": NaN}', "expected value"),
        ("json_schema", '{"minimum": 1e999}', "out of range"),
        ("json_schema", nested(MAX_DEPTH + 1), "deeper"),
        ("json_schema", nested(5000), "deeper"),
        ("regex", "(", "unclosed"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "a" * (MAX_CHARS + 1), "longer"),
        ("lark", "start: nowhere", "nowhere"),
        ("lark", "", "Empty"),
        ("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "nested"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_field_and_the_reason(
    codec: Codec, kind: GrammarKind, text: str, says: str
) -> None:
    with pytest.raises(RequestError) as found:
        codec.compile_grammar(Grammar(kind, text, PARAM))
    assert found.value.param == PARAM
    assert says in found.value.message
    assert len(found.value.message) < 1000


def test_a_token_out_of_the_grammar_fails_the_mask(codec: Codec) -> None:
    mask = codec.compile_grammar(Grammar("lark", 'start: "yes" | "no"'))
    mask.accept(codec.tokenizer.encode("maybe", allow_special=False))
    assert mask.failed
    assert allowed(codec, mask)  # still something to sample, so that the step of the others goes on


def test_masks_of_one_compiler_are_independent(codec: Codec) -> None:
    grammar = Grammar("regex", "ab")
    first, second = codec.compile_grammar(grammar), codec.compile_grammar(grammar)
    first.accept(codec.tokenizer.encode("ab", allow_special=False))
    assert allowed(codec, first) == set(codec.tokenizer.eos_token_ids)
    assert allowed(codec, second) != allowed(codec, first)


def test_a_choice_is_taken_exactly_whatever_its_characters_mean(codec: Codec) -> None:
    texts = ["yes", "yes, sir", "a|b", "(.*)", " 1 + 1 = [2]?\n", "\\d{2}", "世界 & ~#-", "\t"]
    grammar = Grammar("regex", "|".join(map(re.escape, texts)))
    assert all(takes(codec, grammar, text) for text in texts)
    assert not any(takes(codec, grammar, text) for text in ["yes,", "a", "(x)", "11", " 1 + 1 = 2\n"])


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are compiled from here on, slowly."""
    built: list[str] = []
    before = grammar_module._source

    def slow(grammar: Grammar) -> str:
        built.append(grammar.text)
        time.sleep(0.01)
        return before(grammar)

    monkeypatch.setattr(grammar_module, "_source", slow)
    return built


def test_a_grammar_is_compiled_once_also_for_many_at_once(codec: Codec, builds: list[str]) -> None:
    """And each gets a way of its own through it."""
    grammar = Grammar("regex", "(ab|ba){3}")
    with ThreadPoolExecutor(8) as pool:
        masks = list(pool.map(codec.compile_grammar, [grammar] * 16))
    assert builds == [grammar.text]
    a, b = (codec.tokenizer.encode(letter, allow_special=False)[0] for letter in "ab")
    for i, mask in enumerate(masks):
        mask.accept([a, b] if i % 2 else [b])
    assert {b in allowed(codec, mask) for mask in masks[0::2]} == {False}
    assert {b in allowed(codec, mask) for mask in masks[1::2]} == {True}


def test_the_grammars_used_last_are_remembered_and_broken_ones_are_not(
    codec: Codec, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 2)
    compiler = GrammarCompiler(codec.tokenizer, codec.tokenizer.vocab_size)
    for text in ("x1", "x2", "x1", "x3", "x1", "x2"):
        compiler.compile(Grammar("regex", text))
    assert builds == ["x1", "x2", "x3", "x2"]
    for param in ("first", "second"):
        with pytest.raises(RequestError) as found:
            compiler.compile(Grammar("regex", "(", param))
        assert found.value.param == param
    compiler.compile(Grammar("regex", "x2"))
    assert builds[4:] == ["(", "("]

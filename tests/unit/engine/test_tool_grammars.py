"""Grammars that force calls: what the parser reads is what they let through, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferloop.core.errors import RequestError
from inferloop.core.request import Grammar
from inferloop.engine.text.codec import Codec
from inferloop.engine.text.tools.calls import Tool
from inferloop.engine.text.tools.dialects import DIALECTS
from inferloop.engine.text.tools.forced import MAX_CALLS, calls_or_json, forced_calls, strict_calls
from inferloop.models.resolve import resolve

CITY = {"type": "string", "maxLength": 4}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer"}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "$defs": {"unit": {"enum": ["c", "f"]}},
}
TOOLS = (Tool("now"), Tool("get_weather", parameters=SCHEMA, param="tools[1].function.parameters"))
NOW: tuple[str, dict[str, Any]] = ("now", {})
OSLO: tuple[str, dict[str, Any]] = ("get_weather", {"city": "Oslo", "unit": "c"})
FULL: tuple[str, dict[str, Any]] = ("get_weather", {"city": "é", "days": 3, "unit": "f"})


@pytest.fixture
def codec(tiny_directory: Callable[..., Path]) -> Codec:
    return Codec(resolve(str(tiny_directory())))


def allows(codec: Codec, grammar: Grammar, text: str) -> bool:
    """Whether the whole text can be generated, and the answer can end there."""
    mask, end = codec.compile_grammar(grammar), codec.tokenizer.eos_token_ids[0]
    row = np.zeros((258 + 31) // 32, dtype=np.uint32)
    for token in [*codec.tokenizer.encode(text, allow_special=False), end]:
        mask.fill(row)
        if not row[token // 32] >> (token % 32) & 1:
            return False
        mask.accept([token])
    return True


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
def test_exactly_the_calls_that_were_asked_for(codec: Codec, dialect: Any) -> None:
    one = forced_calls(dialect, TOOLS, parallel=False, param="tools")
    several = forced_calls(dialect, TOOLS, parallel=True, param="tools")
    for calls in ([NOW], [OSLO], [FULL]):
        assert allows(codec, one, dialect.write(calls)) and allows(codec, several, dialect.write(calls))
    for calls in ([NOW, FULL], [NOW] * MAX_CALLS):
        assert allows(codec, several, dialect.write(calls)) and not allows(codec, one, dialect.write(calls))
    wrongs: tuple[list[tuple[str, dict[str, Any]]], ...] = (
        [],
        [NOW] * (MAX_CALLS + 1),
        [("other", {})],
        [("now", {"x": 1})],
        [("get_weather", {"city": "Oslo"})],
        [("get_weather", {"city": "London", "unit": "c"})],
        [("get_weather", {"unit": "c", "city": "Oslo"})],
    )
    for wrong in wrongs:
        assert not allows(codec, several, dialect.write(wrong))
    assert not allows(codec, several, f"Well. {dialect.write([NOW])}")
    named = forced_calls(dialect, TOOLS[:1], parallel=False, param="tools")
    assert allows(codec, named, dialect.write([NOW])) and not allows(codec, named, dialect.write([OSLO]))


def test_calls_or_an_answer_of_a_form(codec: Codec) -> None:
    dialect = DIALECTS["hermes"]
    for answer in (Grammar("json_schema", '{"type": "object"}', "f"), Grammar("json_object", param="f")):
        grammar = calls_or_json(dialect, TOOLS, answer, parallel=True)
        assert grammar.param == "f"
        assert allows(codec, grammar, '{"a": 1}') and allows(codec, grammar, dialect.write([NOW, OSLO]))
        assert not allows(codec, grammar, "text")


def test_what_cannot_be_forced_is_refused(codec: Codec) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"a": {"not": {}}}})
    for dialect in DIALECTS.values():
        with pytest.raises(RequestError) as refused:
            codec.compile_grammar(forced_calls(dialect, [tool], parallel=True, param="tools"))
        assert refused.value.param == "tools"
    schemas: tuple[dict[str, Any], ...] = (
        {"additionalProperties": True},
        {"anyOf": []},
        {"properties": {"a b": {}}},
        {"properties": {"a": {}}, "required": ["a", "b"]},
        {"properties": {"a": False}, "required": ["a"]},
    )
    for schema in schemas:
        with pytest.raises(RequestError) as refused:
            forced_calls(DIALECTS["pythonic"], [Tool("f", parameters=schema, param="p")], parallel=True, param="tools")
        assert refused.value.param == "p"
    with pytest.raises(RequestError) as refused:
        codec.compile_grammar(calls_or_json(DIALECTS["hermes"], TOOLS, Grammar("json_schema", "{", "f"), parallel=True))
    assert refused.value.param == "f"


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
def test_a_property_that_may_not_be_is_not_written(codec: Codec, dialect: Any) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"a": False, "b": True}})
    grammar = forced_calls(dialect, [tool], parallel=True, param="tools")
    calls: tuple[tuple[dict[str, Any], bool], ...] = (({}, True), ({"b": 1}, True), ({"a": 1}, False))
    for arguments, fits in calls:
        assert allows(codec, grammar, dialect.write([("f", arguments)])) is fits


def test_strict_calls_in_free_text(codec: Codec) -> None:
    dialect = DIALECTS["hermes"]
    tools = (TOOLS[0], replace(TOOLS[1], strict=True))
    several, one = (strict_calls(dialect, tools, parallel=parallel) for parallel in (True, False))
    assert several is not None and several.param == "tools[1].function.strict" and one is not None
    for text in ("", "No call: <tool>, {}.\n", f"Well.\n{dialect.write([FULL, NOW, OSLO])}\nDone."):
        assert allows(codec, several, text)
    assert allows(codec, one, dialect.write([FULL]) + " Done.")
    assert allows(codec, several, dialect.write([("now", {"x": [1]})]))  # that one is not strict
    for wrong in (("other", {}), ("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "London", "unit": "c"})):
        assert not allows(codec, several, f"Well.\n{dialect.write([wrong])}")
    assert strict_calls(dialect, TOOLS, parallel=True) is None
    assert strict_calls(DIALECTS["llama3_json"], tools, parallel=True) is None


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_object"),
        Grammar("json_schema", '{"type": "object", "additionalProperties": {"type": "null"}}'),
        Grammar("regex", r"\{\}"),
        Grammar("lark", 'start: "{" x\nx: "}"'),
    ],
)
def test_reasoning_before_what_a_grammar_binds(codec: Codec, grammar: Grammar) -> None:
    may, opened = replace(grammar, thinking="may"), replace(grammar, thinking="opened")
    assert allows(codec, may, "{}") and allows(codec, may, "<think>\nI {} </thin 1 < 2.\n</think>\n\n{}")
    assert not allows(codec, may, "I think.</think>{}") and not allows(codec, may, "<think>{}")
    assert allows(codec, opened, "I {}.\n</think>\n\n{}") and allows(codec, opened, "<think>again</think>{}")
    assert not allows(codec, opened, "{}") and not allows(codec, opened, "</think>ok")
    assert not allows(codec, grammar, "<think></think>{}")

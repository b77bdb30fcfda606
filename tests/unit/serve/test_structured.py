"""The fields that ask for structured output, as they arrive."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from inferloop.backends.protocols import GeneratorInfo
from inferloop.core.errors import RequestError
from inferloop.core.request import Grammar
from inferloop.models.identity import ServingIdentity
from inferloop.serve.wire import parse_chat, parse_completion

INFO = GeneratorInfo("m", 1000, ServingIdentity("m", "w", "p", "e", "1", "t", "c"), 500, structured_output=True)
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
NAMED = {"name": "thing", "schema": SCHEMA, "strict": True}


def chat(info: GeneratorInfo = INFO, **fields: Any) -> Grammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode(), info).sampling.grammar


def completion(info: GeneratorInfo = INFO, **fields: Any) -> Grammar | None:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), info).sampling.grammar


def test_response_formats() -> None:
    assert chat(response_format={"type": "text"}) is None
    assert chat(response_format={"type": "json_object"}) == Grammar("json_object")
    found = chat(response_format={"type": "json_schema", "json_schema": NAMED})
    assert found is not None and found.kind == "json_schema"
    assert json.loads(found.text) == SCHEMA
    assert list(json.loads(found.text)["properties"]) == ["z", "a"]  # the order in which they are to be generated


@pytest.mark.parametrize("ask", [chat, completion])
def test_structured_outputs_on_both_endpoints(ask: Any) -> None:
    assert ask(structured_outputs={"regex": "a+"}) == Grammar("regex", "a+")
    assert ask(structured_outputs={"grammar": 'start: "a"'}) == Grammar("lark", 'start: "a"')
    assert json.loads(ask(structured_outputs={"json": SCHEMA}).text) == SCHEMA
    assert ask(structured_outputs={"json": '{"type": "null"}'}) == Grammar("json_schema", '{"type": "null"}')
    assert ask(structured_outputs={"json_object": True}) == Grammar("json_object")
    assert ask(structured_outputs=None) is None


def test_choices_become_an_expression_of_their_exact_texts() -> None:
    texts = ["yes", "a|b", "(.*)", " 1 + 1 = 2?\n", "世界"]
    found = completion(structured_outputs={"choice": texts, "regex": None, "disable_any_whitespace": False})
    assert found is not None and found.kind == "regex"
    assert all(re.fullmatch(found.text, text) for text in texts)
    assert not any(re.fullmatch(found.text, text) for text in ["", "a", "b", "(x)", "yes "])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": NAMED}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "grammar": "x"}}, "response_format.grammar"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "structured_outputs.disable_any_white"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend"),
        ({"structured_outputs": {"regex": 7}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as found:
        chat(**fields)
    assert found.value.status == 400
    assert (found.value.param or "").startswith(param)


def test_a_server_without_it_refuses_by_name() -> None:
    plain = replace(INFO, structured_output=False)
    assert chat(plain, response_format={"type": "text"}) is None
    for ask, field, value in (
        (chat, "response_format", {"type": "json_object"}),
        (chat, "structured_outputs", {"regex": "a"}),
        (completion, "structured_outputs", {"json": {}}),
    ):
        with pytest.raises(RequestError) as found:
            ask(plain, **{field: value})
        assert (found.value.param or "").startswith(field)
        assert found.value.code == "unsupported_parameter"

"""Requests with tools are checked completely, and what follows from them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferloop.backends.protocols import GeneratorInfo
from inferloop.backends.scripted import ScriptedGenerator
from inferloop.core.errors import RequestError
from inferloop.engine.text.answer import AnswerStyle
from inferloop.models.identity import ServingIdentity
from inferloop.serve.wire import Call, parse_chat

HERMES = AnswerStyle("hermes")
IDENTITY = ServingIdentity("m", "w", "p", "e", "1", "t", "c")
INFO = GeneratorInfo("m", 1000, IDENTITY, 500, structured_output=True, answer_style=HERMES)
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOW = {"type": "function", "function": {"name": "now"}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "now"}}


def parse(info: GeneratorInfo = INFO, **fields: Any) -> Call:
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode(), info)


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function()]}, "tools[0].function.name"),
        ({"tools": [NOW, function(name="a b")]}, "tools[1].function.name"),
        ({"tools": [function(name="a\n")]}, "tools[0].function.name"),
        ({"tools": [function(name="x" * 65)]}, "tools[0].function.name"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": [function(name=f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [function(name="f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(name="f", parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(name="f", parameters={"properties": {}})]}, "tools[0].function.parameters.type"),
        (
            {"tools": [function(name="f", parameters={"type": "object", "properties": {"a": 1}})]},
            "tools[0].function.parameters.properties",
        ),
        (
            {"tools": [function(name="f", parameters={"type": "object", "required": "a"})]},
            "tools[0].function.parameters.required",
        ),
        ({"tools": [function(name="f", extra=1)]}, "tools[0].function.extra"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice"),
        ({"tool_choice": "any", "tools": [NOW]}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [NOW]}, "tool_choice.function"),
        ({"parallel_tool_calls": 1, "tools": [NOW]}, "parallel_tool_calls"),
        ({"tools": [NOW], "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"tools": [NOW], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_bad_tools_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**fields)
    assert (refused.value.param, refused.value.status) == (param, 400)


def test_deep_parameters_are_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(100):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(RequestError, match="nested deeper"):
        parse(tools=[function(name="f", parameters=schema)])


def test_what_a_server_cannot_do_is_refused() -> None:
    for style, fields, param in (
        (AnswerStyle(), {}, "tools"),
        (HERMES, {"tool_choice": "required"}, "tool_choice"),
        (HERMES, {"tool_choice": NAMED}, "tool_choice"),
    ):
        info = GeneratorInfo("m", 1000, IDENTITY, 500, answer_style=style)
        with pytest.raises(RequestError) as refused:
            parse(info, tools=[NOW], **fields)
        assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")
        assert parse(info, tools=[NOW], tool_choice="none").answer.tool_dialect is None


def test_tools_reach_the_template_in_openais_form() -> None:
    call = parse(tools=[NOW, WEATHER], tool_choice="none")
    nothing = {"type": "object", "properties": {}}
    assert call.prompts[0].tools == (function(name="now", parameters=nothing), WEATHER)
    assert parse(tools=[]) == parse()


def test_who_chose_decides_what_is_looked_for() -> None:
    tools = [NOW, WEATHER]
    auto = parse(tools=tools)
    assert (auto.answer.tool_names, auto.answer.max_calls, auto.sampling.grammar) == (
        ("now", "get_weather"),
        None,
        None,
    )
    assert parse(tools=tools, parallel_tool_calls=False).answer.max_calls == 1
    required, named = parse(tools=tools, tool_choice="required"), parse(tools=tools, tool_choice=NAMED)
    assert required.sampling.grammar is not None and "get_weather" in required.sampling.grammar.text
    assert named.sampling.grammar is not None and "get_weather" not in named.sampling.grammar.text
    assert (named.answer.tool_names, named.answer.max_calls, named.answer.named) == (("now",), 1, True)
    # what the text has to be is no concern of an answer that is all calls; else it is the other thing that it may be
    either = parse(tools=tools, response_format={"type": "json_object"}).sampling.grammar
    assert either is not None and either.text.startswith("start: calls | answer")
    assert parse(tools=tools, tool_choice="required", response_format={"type": "json_object"}) == required


@pytest.mark.parametrize("depth", [70, 991])
def test_an_answer_of_any_depth_beside_tools_is_left_to_the_compiler(depth: int) -> None:
    schema = '{"a":' * depth + "1" + "}" * depth
    answer = {"type": "json_schema", "json_schema": {"name": "n", "schema": "SCHEMA"}}
    body = json.dumps({"model": "m", "messages": [USER], "tools": [NOW], "response_format": answer})
    try:
        grammar = parse_chat(body.replace('"SCHEMA"', schema).encode(), INFO).sampling.grammar
    except RequestError as error:  # so deep that the body cannot be read
        assert error.code == "invalid_json"
    else:
        assert grammar is not None and grammar.kind == "json_schema"


def test_a_grammar_binds_what_comes_after_the_reasoning() -> None:
    style = AnswerStyle("hermes", thinks=True, think_opened=True)
    info = GeneratorInfo("m", 1000, IDENTITY, 500, structured_output=True, answer_style=style)
    assert parse(info, tools=[NOW]).answer.think_opened
    for fields in (
        {"tools": [NOW], "tool_choice": "required"},
        {"tools": [NOW], "response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object"}},
    ):
        call = parse(info, **fields)
        assert call.answer.think_opened and call.sampling.grammar is not None
        assert call.sampling.grammar.thinking == "opened"


def test_strict_tools_bind_calls_but_not_text() -> None:
    style = AnswerStyle("hermes", thinks=True)
    info = GeneratorInfo("m", 1000, IDENTITY, 500, structured_output=True, answer_style=style)
    call = parse(info, tools=[NOW, function(name="f", parameters=SCHEMA, strict=True)])
    assert call.sampling.grammar is not None and call.sampling.grammar.param == "tools[1].function.strict"
    assert call.answer.thinks and call.answer.tool_names == ("now", "f")
    assert call.sampling.grammar.thinking == "no"  # there the reasoning is text like any other


def assistant(*calls: tuple[str, str, str], content: str | None = None) -> dict[str, Any]:
    told = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": content, "tool_calls": told}


def test_a_conversation_with_calls_reaches_the_template() -> None:
    messages = [
        USER,
        {**assistant(("1", "now", ""), ("2", "get_weather", '{"city":"Oslo"}')), "reasoning": "hm", "refusal": None},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "rain"}]},
        {"role": "tool", "tool_call_id": "1", "content": "noon", "name": "clock"},
    ]
    plain = parse(messages=messages).prompts[0].messages
    assert plain is not None
    assert plain[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "now", "arguments": {}}},
            {"id": "2", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
        ],
    }
    assert plain[2] == {"role": "tool", "content": "rain", "tool_call_id": "2", "name": "get_weather"}
    assert plain[3]["name"] == "clock"


def test_an_answer_cut_while_thinking_can_be_sent_back() -> None:
    cut = {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm"}
    plain = parse(messages=[USER, cut, USER]).prompts[0].messages
    assert plain is not None and plain[1] == {"role": "assistant", "content": "", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "reasoning": ""}], "messages[0].content"),
        ([USER, {"role": "tool", "tool_call_id": "1", "content": "x"}], "messages[1].tool_call_id"),
        ([assistant(("1", "now", "{")), USER], "messages[0].tool_calls[0].function.arguments"),
        ([assistant(("1", "now", "[]")), USER], "messages[0].tool_calls[0].function.arguments"),
        ([assistant(("1", "now", '{"a":' * 99 + "1" + "}" * 99))], "messages[0].tool_calls[0].function.arguments"),
        ([{**USER, "tool_calls": assistant(("1", "now", "{}"))["tool_calls"]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].type"),
    ],
)
def test_bad_histories_are_named(messages: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(messages=messages)
    assert refused.value.param == param


def test_how_answers_are_read_is_part_of_the_identity() -> None:
    styles = (AnswerStyle("hermes"), AnswerStyle("pythonic"), AnswerStyle("hermes", thinks=True))
    digests = {ScriptedGenerator(answer_style=style).describe()[0].identity.digest for style in styles}
    assert len(digests) == 3

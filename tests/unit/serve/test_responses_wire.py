"""Bodies of /v1/responses: what they mean, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.backends.protocols import GeneratorInfo
from inferloop.core.errors import RequestError
from inferloop.core.request import Grammar, Sampling
from inferloop.engine.text.answer import AnswerStyle
from inferloop.models.identity import ServingIdentity
from inferloop.serve.responses.items import InputItem
from inferloop.serve.responses.wire import ResponseCall, ResponsesRequest, parse_response
from inferloop.serve.wire import parse_chat

INFO = GeneratorInfo("m", 1000, ServingIdentity("m", "w", "p", "e", "1", "t", "c"), 500, structured_output=True)
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
LOGPROBS = ["message.output_text.logprobs"]
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
TOOLED = replace(INFO, answer_style=AnswerStyle("hermes"))
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


def parse(info: GeneratorInfo = INFO, **fields: Any) -> ResponseCall:
    return parse_response(json.dumps({"model": "m", "input": "hi", **fields}).encode(), info)


def messages(given: Any, **fields: Any) -> list[dict[str, Any]]:
    return list(parse(input=given, **fields).prompts[0].messages or ())


def test_defaults_are_openais() -> None:
    call = parse()
    assert call.sampling == Sampling()
    assert (call.stream, call.cache_salt, call.priority, call.num_per_prompt) == (False, "", 0, 1)
    assert messages("hi") == [{"role": "user", "content": "hi"}]


def test_every_field_arrives() -> None:
    call = parse(
        max_output_tokens=9, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=-1, stop=["a"], stop_token_ids=[4],
        min_tokens=2, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias={"7": 1},
        include=LOGPROBS, top_logprobs=4, stream=True, cache_salt="s", priority=-3,
    )  # fmt: skip
    assert call.sampling == Sampling(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=2**64 - 1, stop=("a",), stop_token_ids=(4,),
        min_tokens=2, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias=((7, 1.0),),
        num_logprobs=4,
    )  # fmt: skip
    assert (call.stream, call.cache_salt, call.priority) == (True, "s", -3)
    assert parse(include=LOGPROBS).sampling.num_logprobs == 0
    assert parse(include=[]).sampling.num_logprobs is parse(top_logprobs=0).sampling.num_logprobs is None


def test_items_become_messages() -> None:
    parts = [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]
    answer_as_it_came = {
        "id": "msg_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
    }
    given = [
        {"role": "developer", "content": "a"},
        answer_as_it_came,
        {"type": "message", "role": "user", "content": parts},
    ]
    assert messages(given, instructions="first") == [
        {"role": "system", "content": "first"},
        {"role": "system", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c\nd"},
    ]


def test_calls_and_what_they_gave_are_turns_of_the_conversation() -> None:
    say, ask = {"role": "assistant", "content": "let me see"}, {"role": "user", "content": "x"}
    other = {**CALL, "call_id": "c2", "id": "fc_2", "status": "completed"}
    parts = [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "3"}]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        for call_id in ("c1", "c2")
    ]
    results = [
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "name": "f", "content": "4\n3"},
    ]
    outputs = [OUTPUT, {**OUTPUT, "call_id": "c2", "output": parts}]
    assert messages([ask, say, CALL, other, *outputs]) == [ask, {**say, "tool_calls": calls}, *results]
    no_arguments = messages([ask, {**CALL, "arguments": ""}])[1]["tool_calls"][0]["function"]
    assert no_arguments == {"name": "f", "arguments": {}}
    silent = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
    assert messages([ask, CALL, OUTPUT, CALL]) == [ask, silent, results[0], silent]


def test_reasoning_is_of_the_turn_that_it_led_to() -> None:
    ask = {"role": "user", "content": "x"}
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "status": "completed",
    }
    turn = {"role": "assistant", "content": "y", "reasoning_content": "hm"}
    assert messages([ask, thought, {"role": "assistant", "content": "y"}, ask]) == [ask, turn, ask]
    called = messages([ask, thought, CALL])[1]
    assert (called["content"], called["reasoning_content"], len(called["tool_calls"])) == ("", "hm", 1)
    assert messages([ask, thought, ask]) == [ask, {**turn, "content": ""}, ask]
    assert len(messages([thought, thought])) == 2


def test_a_conversation_with_tools_is_the_same_in_both_forms() -> None:
    """What the engine gets is what a chat of the same meaning brings there, byte for byte."""
    definition = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
    function = {"name": "f", "arguments": '{"a": 1}'}
    chat = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "ok",
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ],
        "tools": [{"type": "function", "function": definition}],
    }
    given = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}, CALL, OUTPUT]
    for choices in (
        (None, None),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}),
    ):
        for parallel in (None, False):
            told = parse_chat(
                json.dumps({**chat, "tool_choice": choices[0], "parallel_tool_calls": parallel}).encode(), TOOLED
            )
            ours = parse(
                TOOLED,
                input=given,
                instructions="be",
                tools=[{"type": "function", **definition}],
                tool_choice=choices[1],
                parallel_tool_calls=parallel,
            )
            assert (ours.prompts, ours.sampling, ours.answer) == (told.prompts, told.sampling, told.answer)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, None),
        ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tools": [TOOL], "max_tool_calls": 1}, "max_tool_calls"),
    ],
)  # fmt: skip
def test_bad_tools_are_named(fields: dict[str, Any], param: str | None) -> None:
    if param is None:
        assert parse(TOOLED, **fields).sampling.grammar is not None
    else:
        assert (refusal(TOOLED, **fields).param or "").startswith(param)


def test_tools_that_the_model_cannot_call_are_refused() -> None:
    assert refusal(tools=[TOOL]).param == "tools"
    assert parse(tools=[TOOL], tool_choice="none").prompts[0].tools


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ([], "input"), ("", "input"), (7, "input"), ([{}], "input[0].role"), ([7], "input[0]"),
        ([{"role": "user"}], "input[0].content"), ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": "x", "call_id": "c"}], "input[0].call_id"),
        ([{"role": "user", "content": "x", "name": "Bob"}], "input[0].name"),
        ([{"role": "user", "content": "x", "other": 1}], "input[0].other"),
        ([{"type": "reasoning", "summary": []}], "input[0].content"),
        ([{"type": "item_reference", "id": "x"}], "input[0]"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "input[0].content[0]"),
        ([{"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [{}]}]}],
         "input[0].content[0].annotations"),
        ([{**CALL, "arguments": "{"}], "input[0].arguments"), ([{**CALL, "arguments": "[]"}], "input[0].arguments"),
        ([{**CALL, "arguments": "[" * 100_000}], "input[0].arguments"),
        ([{**CALL, "call_id": None}], "input[0].call_id"), ([{**CALL, "content": "x"}], "input[0].content"),
        ([{"type": "reasoning", "content": [], "encrypted_content": "x"}], "input[0].encrypted_content"),
        ([{"type": "reasoning", "content": [], "summary": [{}]}], "input[0].summary"),
        ([{"type": "reasoning", "content": [{"type": "output_text", "text": "x"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "reasoning_text", "text": "x"}]}], "input[0].content[0]"),
        ([{**CALL, "name": "a b"}], "input[0].name"),
        ([OUTPUT], "input[0].call_id"), ([CALL, {**OUTPUT, "call_id": "c9"}], "input[1].call_id"),
        ([OUTPUT, CALL], "input[0].call_id"),
        ([CALL, {**OUTPUT, "output": [{"type": "input_image", "image_url": "x"}]}], "input[1].output[0]"),
    ],
)  # fmt: skip
def test_bad_input_is_named(given: Any, where: str) -> None:
    error = refusal(input=given)
    assert (error.param or "").startswith(where), error.param
    if "image" in str(given) or "input_file" in str(given):
        assert error.code == "unsupported_content"


def refusal(info: GeneratorInfo = INFO, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as found:
        parse(info, **fields)
    assert found.value.status in (400, 404)
    return found.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True), ("store", True), ("previous_response_id", "resp_1"), ("conversation", "conv_1"),
        ("conversation", {"id": "conv_1"}), ("truncation", "auto"), ("reasoning", {"effort": "high"}),
        ("max_tool_calls", 3), ("prompt", {"id": "p"}), ("service_tier", "flex"), ("prompt_cache_retention", "24h"),
        ("context_management", [{"type": "compaction"}]), ("tools", [{"type": "web_search"}]),
        ("tool_choice", "required"), ("include", ["reasoning.encrypted_content"]), ("include", "x"),
        ("max_output_tokens", 0), ("max_output_tokens", 1.5), ("temperature", 2.1), ("top_p", 0), ("top_logprobs", 21),
        ("metadata", {"a": 1}), ("metadata", {"a" * 65: "b"}), ("metadata", {"a": "b" * 513}),
        ("metadata", {str(i): "" for i in range(17)}), ("instructions", 7), ("instructions", [{"role": "user"}]),
        ("user", 7), ("stream_options", {"include_usage": True}), ("stream", "yes"), ("priority", 1001),
        ("max_tokens", 5), ("messages", []), ("n", 1), ("temprature", 1), ("model", "other"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(field: str, value: Any) -> None:
    assert (refusal(**{field: value}).param or "").startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", False), ("store", False), ("previous_response_id", None), ("truncation", "disabled"),
        ("tools", []), ("tool_choice", "auto"), ("parallel_tool_calls", True), ("service_tier", "default"),
        ("include", None), ("text", {}), ("text", {"format": {"type": "text"}, "verbosity": "medium"}),
        ("metadata", {"a": "b"}), ("reasoning", None), ("prompt_cache_key", "k"), ("top_k", -1),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_is_accepted(field: str, value: Any) -> None:
    asked, plain = parse(**{field: value}), parse()
    assert replace(asked, request=plain.request) == plain


def test_contradictions() -> None:
    assert refusal(top_logprobs=2).param == "top_logprobs"
    assert refusal(stream_options={}).param == "stream_options"
    assert (
        refusal(stream=True, stream_options={"include_obfuscation": True}).param == "stream_options.include_obfuscation"
    )
    assert parse(stream=True, stream_options={"include_obfuscation": False}).stream
    assert refusal(min_tokens=6, max_output_tokens=5).param == "min_tokens"


def formatted(info: GeneratorInfo = INFO, **format_: Any) -> Grammar | None:
    return parse(info, text={"format": format_}).sampling.grammar


def test_text_formats() -> None:
    assert formatted(type="text") is None
    assert formatted(type="json_object") == Grammar("json_object")
    found = formatted(type="json_schema", name="thing", schema=SCHEMA, strict=True, description="d")
    assert found is not None and found.kind == "json_schema"
    assert list(json.loads(found.text)["properties"]) == ["z", "a"]  # the order in which they are to be generated
    assert parse(structured_outputs={"regex": "a+"}).sampling.grammar == Grammar("regex", "a+")


@pytest.mark.parametrize(
    ("format_", "param"),
    [
        ({"type": "xml"}, "text.format.type"), ({}, "text.format.type"), ("json", "text.format"),
        ({"type": "json_schema"}, "text.format.name"), ({"type": "json_schema", "name": "x"}, "text.format.schema"),
        ({"type": "json_schema", "name": "", "schema": {}}, "text.format.name"),
        ({"type": "json_schema", "json_schema": {}}, "text.format.json_schema"),
        ({"type": "json_object", "schema": {}}, "text.format.schema"),
        ({"type": "text", "name": "x"}, "text.format.name"),
    ],
)  # fmt: skip
def test_bad_formats_are_named(format_: Any, param: str) -> None:
    assert refusal(text={"format": format_}).param == param


def test_formats_beside_other_fields() -> None:
    json_object = {"format": {"type": "json_object"}}
    assert refusal(text={"verbosity": "low"}).param == "text.verbosity"
    assert refusal(text=json_object, structured_outputs={"regex": "a"}).param == "structured_outputs"
    assert refusal(text=json_object, ignore_eos=True).param == "ignore_eos"
    error = refusal(replace(INFO, structured_output=False), text=json_object)
    assert (error.param, error.code) == ("text.format", "unsupported_parameter")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ITEMS = st.lists(
    st.dictionaries(
        st.sampled_from(InputItem.__struct_fields__),
        st.sampled_from(
            ["message", "reasoning", "function_call", "function_call_output", "user", "assistant", "f", "{}"]
        )
        | JSON,
        max_size=5,
    ),
    max_size=4,
)


@given(st.dictionaries(st.sampled_from([*ResponsesRequest.__struct_fields__, "other"]), JSON, max_size=4), ITEMS)
def test_no_value_does_anything_but_pass_or_be_refused(fields: dict[str, Any], items: list[dict[str, Any]]) -> None:
    for asked in (fields, {"input": items}):
        try:
            call = parse(TOOLED, **asked)
        except RequestError as error:
            assert error.message
        else:
            assert all(isinstance(message["content"], str) for message in call.prompts[0].messages or ())

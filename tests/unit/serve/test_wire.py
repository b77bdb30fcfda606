"""Requests are checked completely before the engine hears of them; nothing is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.backends.protocols import GeneratorInfo, Prompt
from inferloop.core.errors import RequestError
from inferloop.core.request import Sampling
from inferloop.models.identity import ServingIdentity
from inferloop.serve.errors import error_object
from inferloop.serve.wire import ChatRequest, CompletionRequest, parse_chat, parse_completion

INFO = GeneratorInfo("m", 1000, ServingIdentity("m", "w", "p", "e", "1", "t", "c"), 500)
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", **fields}).encode()


def refusal(parse: Any, body: bytes) -> RequestError:
    with pytest.raises(RequestError) as found:
        parse(body, INFO)
    return found.value


def test_defaults_are_openais() -> None:
    call = parse_chat(chat(), INFO)
    assert call.sampling == Sampling(temperature=1.0, max_tokens=None)
    assert (call.stream, call.include_usage) == (False, False)
    assert call.prompts == (Prompt(messages=({"role": "user", "content": "hi"},)),)
    sampling = parse_completion(completion(), INFO).sampling
    assert (sampling.max_tokens, sampling.cut_max_tokens) == (16, True)
    sampling = parse_completion(completion(max_tokens=7), INFO).sampling
    assert (sampling.max_tokens, sampling.cut_max_tokens) == (7, False)


def test_null_means_the_default() -> None:
    nulls = dict.fromkeys(set(ChatRequest.__struct_fields__) - {"model", "messages"})
    assert parse_chat(chat(**nulls), INFO) == parse_chat(chat(), INFO)
    nulls = dict.fromkeys(set(CompletionRequest.__struct_fields__) - {"model", "prompt"})
    assert parse_completion(completion(**nulls), INFO) == parse_completion(completion(), INFO)


def test_every_value_arrives() -> None:
    call = parse_chat(
        chat(
            temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=-1, max_completion_tokens=7, min_tokens=2,
            stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, logprobs=True, top_logprobs=4, presence_penalty=0.5,
            frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias={"7": -100, "3": 1.5}, stream=True,
            stream_options={"include_usage": True},
        ),
        INFO,
    )  # fmt: skip
    assert call.sampling == Sampling(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=2**64 - 1, max_tokens=7, min_tokens=2, stop=("a", "b"),
        stop_token_ids=(3,), ignore_eos=True, num_logprobs=4, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.2, logit_bias=((3, 1.5), (7, -100.0)),
    )  # fmt: skip
    assert (call.stream, call.include_usage) == (True, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1), ("temperature", True), ("top_p", 0), ("top_k", 501), ("top_k", -2), ("min_p", 1.1),
        ("seed", 2**63), ("seed", 0.5), ("max_tokens", 0), ("max_tokens", 10**30 + 0.5), ("min_tokens", -1),
        ("n", 17), ("n", 0),
        ("stop", ""), ("stop", ["a"] * 17), ("stop", [""]), ("stop", ["x" * 2000]), ("stop_token_ids", [500]),
        ("stop_token_ids", [0] * 65), ("ignore_eos", "yes"), ("logit_bias", {"500": 1}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}), ("logit_bias", {"1" * 5000: 1}), ("logit_bias", {"٣": 1}),
        ("logit_bias", {"1": 101}), ("logit_bias", [1]), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("stream", 1), ("stream_options", {"x": 1}),
        ("top_logprobs", 21), ("tools", [{"type": "function"}]), ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}), ("modalities", ["audio"]), ("store", True), ("store", 0),
        ("priority", 1001), ("priority", -1001), ("priority", 0.5), ("priority", "high"),
        ("reasoning_effort", "high"), ("audio", {}), ("functions", [{}]), ("service_tier", "priority"),
        ("temprature", 1), ("guided_json", {}), ("messages", []), ("messages", "hi"),
    ],
)  # fmt: skip
def test_bad_chat_fields_are_named(field: str, value: Any) -> None:
    error = refusal(parse_chat, chat(**{field: value}))
    assert error.status == 400
    assert error.param is not None and error.param.startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ""), ("prompt", []), ("prompt", [""]), ("prompt", ["a", ""]), ("prompt", [500]), ("prompt", [-1]),
        ("prompt", [[1, 500]]), ("prompt", [[1], []]), ("prompt", [1, "a"]), ("prompt", [[1], "a"]),
        ("prompt", ["a"] * 65), ("prompt", [[[1]]]), ("prompt", 7), ("prompt", None), ("logprobs", True),
        ("logprobs", 21), ("echo", 1), ("suffix", "x"), ("best_of", 2), ("messages", MESSAGES),
    ],
)  # fmt: skip
def test_bad_completion_fields_are_named(field: str, value: Any) -> None:
    error = refusal(parse_completion, completion(**{field: value}))
    assert error.param is not None and error.param.startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []), ("tool_choice", "none"), ("response_format", {"type": "text"}), ("n", 1), ("store", False),
        ("parallel_tool_calls", False), ("modalities", ["text"]), ("service_tier", "auto"), ("user", "someone"),
        ("metadata", {"a": "b"}), ("top_k", -1),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_is_accepted(field: str, value: Any) -> None:
    assert parse_chat(chat(**{field: value}), INFO) == parse_chat(chat(), INFO)


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "name": 7}, "messages[0].name"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "messages[0].reasoning_content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0]"),
    ],
)
def test_bad_messages_are_named(message: dict[str, Any], where: str) -> None:
    error = refusal(parse_chat, chat(messages=[message]))
    assert error.param is not None and error.param.startswith(where)


def test_messages_reach_the_template_plainly() -> None:
    answer_as_it_came: dict[str, Any] = {
        "role": "assistant",
        "content": "b",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    messages = [{"role": "developer", "content": "a"}, answer_as_it_came, {"role": "user", "content": parts}]
    assert parse_chat(chat(messages=messages), INFO).prompts[0].messages == (
        {"role": "system", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c\nd"},
    )


def test_more_items_than_the_context_has_tokens_are_refused_unread() -> None:
    for parse, body, field in (
        (parse_completion, completion(prompt=[10**9] * 1000), "prompt"),
        (parse_chat, chat(messages=[{"role": "user", "content": "", "annotations": 1}] * 1000), "messages"),
    ):
        error = refusal(parse, body)
        assert (error.param, error.code) == (field, "context_length_exceeded")
    assert len(parse_completion(completion(prompt=[1] * 999), INFO).prompts[0].token_ids or ()) == 999


def test_contradictions() -> None:
    assert refusal(parse_chat, chat(max_tokens=5, max_completion_tokens=6)).param == "max_completion_tokens"
    assert refusal(parse_chat, chat(top_logprobs=1)).param == "top_logprobs"
    assert refusal(parse_chat, chat(stream_options={})).param == "stream_options"
    assert refusal(parse_chat, chat(min_tokens=6, max_tokens=5)).param == "min_tokens"


def test_several_prompts_and_choices() -> None:
    call = parse_completion(completion(prompt=["a", "b"], n=3, echo=True), INFO)
    assert call.prompts == (Prompt(text="a"), Prompt(text="b"))
    assert (call.num_per_prompt, call.echo) == (3, True)
    call = parse_completion(completion(prompt=[[1, 2], [3]]), INFO)
    assert call.prompts == (Prompt(token_ids=(1, 2)), Prompt(token_ids=(3,)))
    assert (call.num_per_prompt, call.echo) == (1, False)
    assert parse_completion(completion(prompt=[1, 2]), INFO).prompts == (Prompt(token_ids=(1, 2)),)
    assert parse_completion(completion(prompt=["a"]), INFO).prompts == (Prompt(text="a"),)
    assert parse_chat(chat(n=16), INFO).num_per_prompt == 16
    assert len(parse_completion(completion(prompt=["a"] * 64, n=2), INFO).prompts) == 64


def test_several_are_bounded_together_and_the_bad_one_is_named() -> None:
    assert refusal(parse_completion, completion(prompt=["a"] * 64, n=3)).param == "n"
    assert refusal(parse_completion, completion(prompt=["a"] * 65)).param == "prompt"
    assert refusal(parse_completion, completion(prompt=["a", "b", ""])).param == "prompt[2]"
    assert refusal(parse_completion, completion(prompt=[[1], [2, 500]])).param == "prompt[1]"
    error = refusal(parse_completion, completion(prompt=[[1], [1] * 1000]))
    assert (error.param, error.code) == ("prompt[1]", "context_length_exceeded")


def test_echo_with_logprobs_is_refused_by_name() -> None:
    error = refusal(parse_completion, completion(echo=True, logprobs=0))
    assert (error.param, error.code) == ("echo", "unsupported_parameter")
    assert parse_completion(completion(echo=False, logprobs=0), INFO).sampling.num_logprobs == 0


@pytest.mark.parametrize(("parse", "body", "type_"), [
    (parse_chat, chat, ChatRequest), (parse_completion, completion, CompletionRequest),
])  # fmt: skip
def test_what_is_not_supported_may_say_that_it_asks_for_nothing(parse: Any, body: Any, type_: Any) -> None:
    plain = parse(body(), INFO)
    for field, accepted in type_.no_op.items():
        for value in accepted:
            assert parse(body(**{field: value}), INFO) == plain, field
        error = refusal(parse, body(**{field: "something"}))
        assert (error.param, error.code) == (field, "unsupported_parameter")
    assert refusal(parse, body(skip_special_tokens=False)).param == "skip_special_tokens"
    assert refusal(parse, body(skip_special_tokens=1)).param == "skip_special_tokens"


def test_a_typo_gets_the_nearest_name_and_a_wrong_model_404() -> None:
    assert "did you mean temperature?" in refusal(parse_chat, chat(temprature=1)).message
    error = refusal(parse_chat, chat(model="other"))
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_named(number: str) -> None:
    body = chat(temperature=1).replace(b'"temperature": 1', f'"temperature": {number}'.encode())
    assert refusal(parse_chat, body).param == "temperature"
    body = chat(logit_bias={"1": 7}).replace(b'"1": 7', f'"1": {number}'.encode())
    assert (refusal(parse_chat, body).param or "").startswith("logit_bias")


@pytest.mark.parametrize("number", ["NaN", '"\\udc00"'])
def test_halves_of_characters_are_named(number: str) -> None:
    body = chat(messages=[{"role": "user", "content": "MARK"}]).replace(b'"MARK"', number.encode())
    assert refusal(parse_chat, body).param == "messages[0].content"
    body = chat().replace(b'"model"', b'"\\ud83d": ' + number.encode() + b', "model"')
    error = refusal(parse_chat, body)
    assert "lone surrogate" in error.message and json.loads(error_object(error))["error"]["type"]


def test_errors_do_not_send_the_request_back() -> None:
    told = error_object(refusal(parse_chat, chat(**{"x" * 100_000: 1})))
    assert len(told) < 10_000 and json.loads(told)["error"]["message"].startswith("xxx")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"x"', b"\xff", b"{}", b"[" * 100_000, b'{"model":"m","messages":' + b"[" * 9999],
)
def test_broken_bodies_are_refused(body: bytes) -> None:
    assert refusal(parse_chat, body).status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*ChatRequest.__struct_fields__, "other"]), JSON, max_size=4))
def test_no_value_does_anything_but_pass_or_be_refused(fields: dict[str, Any]) -> None:
    try:
        call = parse_chat(chat(**fields), INFO)
    except RequestError as error:
        assert error.message
    else:
        assert 0 <= call.sampling.temperature <= 2 and 0 < call.sampling.top_p <= 1
        assert all(0 <= i < 500 for i in call.sampling.stop_token_ids)

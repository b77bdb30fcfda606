"""What routing reads of requests and answers: whatever they hold, however a stream was cut."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferloop.fleet.act.gateway.account import Tokens
from inferloop.fleet.act.gateway.body import read_body
from inferloop.fleet.act.gateway.frames import FrameBuffer
from inferloop.fleet.act.gateway.read_answer import (
    BrokenStreamError,
    UnreadableError,
    UsageTap,
    clean_stream,
    read_stream,
    read_whole,
    tokens_alone,
)

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize")
NAMES = """model stream messages content input tools tool_choice type function name text response_format json_object
stream_options include_usage logprobs echo choices usage output delta tool_calls arguments index message prompt_tokens
prompt_tokens_details completion_tokens"""
words = st.sampled_from(NAMES.split())
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words
    | st.text(max_size=4)
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4), max_leaves=20
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PATHS), st.dictionaries(words, anything, max_size=6), st.booleans())
def test_a_body_is_sent_on_unchanged_but_for_what_routing_adds(path: str, content: Any, needs: bool) -> None:
    raw = json.dumps(content).encode()
    body = read_body(path, raw)
    if not isinstance(content.get("model"), str | None):  # what that means is for the replica to say
        assert body.for_model("strong", needs_logprobs=needs) == raw
        return
    sent = json.loads(body.for_model("strong", needs_logprobs=needs))
    assert sent.pop("model") == "strong"
    added = {"logprobs"} if body.adds_logprobs(needs) else set()
    added |= {"stream_options"} if body.stream and not body.asks_usage else set()
    assert {k: v for k, v in sent.items() if k not in added} == {
        k: v for k, v in content.items() if k not in added | {"model"}
    }


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(PATHS), st.binary(max_size=60) | st.text(alphabet='{}[]:,"modelstre1', max_size=60).map(str.encode)
)
def test_any_bytes_are_a_body(path: str, raw: bytes) -> None:
    body = read_body(path, raw)
    if body.fields is None:
        assert body.for_model("strong", needs_logprobs=True) == raw


def test_values_are_kept_to_the_letter() -> None:
    raw = b'{"model": "desk", "temperature": 1.0e-1, "seed": 12345678901234567890, "messages": [ ]}'
    sent = read_body(PATHS[0], raw).for_model("cheap", needs_logprobs=False)
    assert b"1.0e-1" in sent and b"12345678901234567890" in sent and b"[ ]" in sent


@pytest.mark.parametrize(("told", "asks"), [(0, True), (3, True), (None, False), (False, False), (True, True)])
def test_zero_log_probabilities_are_asked_for_too(told: Any, asks: bool) -> None:
    assert read_body("/v1/completions", json.dumps({"logprobs": told}).encode()).asks_logprobs is asks


@pytest.mark.parametrize(
    ("dialect", "frame", "error", "ended"),
    [
        ("chat", {"error": {"type": "request_ended_error", "code": "cancelled"}}, True, 499),
        ("chat", {"error": {"type": "request_ended_error", "code": "timeout"}}, True, 408),
        ("chat", {"error": {"type": "server_error", "code": "engine_error"}}, False, None),
        ("chat", {"error": "no object"}, False, None),
        ("responses", {"type": "response.failed", "response": {"error": {"type": "request_ended_error"}}}, True, 499),
        ("responses", {"type": "response.failed", "response": {"error": {"type": "server_error"}}}, False, None),
        ("responses", {"type": "error", "error": {"type": "server_error"}}, False, None),
    ],
)
def test_what_ended_a_stream_is_told_from_what_broke_it(dialect: Any, frame: Any, error: bool, ended: Any) -> None:
    with pytest.raises(BrokenStreamError) as caught:
        read_stream(b"data: " + json.dumps(frame).encode() + b"\n\n", dialect, reads_logprobs=True)
    assert caught.value.ended == ended and bool(caught.value.body) is error


SHAPE = {"type": "object", "required": ["b", "a"]}


@pytest.mark.parametrize(
    ("path", "content", "schema", "offered"),
    [
        (0, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SHAPE}}}, SHAPE, None),
        (0, {"response_format": {"type": "json_schema"}}, None, None),
        (1, {"structured_outputs": {"json": SHAPE}}, SHAPE, None),
        (1, {"structured_outputs": {"json": json.dumps(SHAPE)}}, SHAPE, None),
        (2, {"text": {"format": {"type": "json_schema", "name": "n", "schema": SHAPE}}}, SHAPE, None),
        (0, {"tools": [{"type": "function", "function": {"name": "f", "parameters": SHAPE}}]}, None, {"f": SHAPE}),
        (0, {"tools": [{"type": "function", "function": {"name": "f"}}]}, None, {"f": None}),
        (2, {"tools": [{"type": "function", "name": "f", "parameters": SHAPE}, {"type": "x"}]}, None, {"f": SHAPE}),
        (0, {"tools": [{"function": {"name": "f"}}], "tool_choice": "none"}, None, None),
    ],
)
def test_the_schemas_that_a_request_names(path: int, content: Any, schema: Any, offered: Any) -> None:
    wants = read_body(PATHS[path], json.dumps(content).encode()).wants
    assert (None if wants.schema is None else json.loads(wants.schema)) == schema
    told = {name: None if text is None else json.loads(text) for name, text in (wants.offered or {}).items()}
    assert told == (offered or {}) and wants.json is ("tools" not in content)
    assert wants.has_schema is (SHAPE in (schema, *(offered or {}).values()))


def test_an_echo_has_the_prompts_log_probabilities_among_its_own() -> None:
    body = read_body("/v1/completions", b'{"echo": true}')
    assert not body.reads_logprobs and not body.adds_logprobs(True)


choices = st.lists(
    st.tuples(st.text(max_size=12), st.lists(st.tuples(st.sampled_from("fg"), st.just('{"a": 1}')), max_size=2)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(choices, st.randoms(use_true_random=False), st.sampled_from(["\n\n", "\r\n\r\n"]), st.booleans())
def test_a_stream_reads_as_the_whole_answer_does(made: Any, rng: Any, end: str, with_logprobs: bool) -> None:
    """Whatever the pieces were, in whatever order the choices come."""
    used = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    whole: list[Any] = []
    left: list[Any] = []
    for index, (text, calls) in enumerate(made):
        told = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
        values = [-0.5 * (i + 1) for i in range(len(text))] if with_logprobs else []
        logprobs = {"content": [{"logprob": value} for value in values]} if values else None
        whole.append({"message": {"content": text, "tool_calls": told}, "logprobs": logprobs})
        parts = [
            ({"content": text[i]}, {"content": [{"logprob": values[i]}]} if values else None) for i in range(len(text))
        ] or [({"content": ""}, None)]
        for number, call in enumerate(told):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            parts.append(({"tool_calls": [{"index": number, "function": {"name": name}}]}, None))
            parts += [({"tool_calls": [{"index": number, "function": {"arguments": c}}]}, None) for c in arguments]
        if values:  # a token that ends no character has no text
            parts.insert(rng.randint(0, len(parts)), ({"content": ""}, {"content": []}))
        left.append([{"choices": [{"index": index, "delta": d, "logprobs": lp}], "usage": None} for d, lp in parts])
        left[-1][-1]["choices"][0]["finish_reason"] = "stop"
    frames = []
    while left:
        one = rng.choice(left)
        frames.append(one.pop(0))
        left = [part for part in left if part]
    frames.append({"choices": [], "usage": used})
    lines = [f"data: {json.dumps(frame, separators=(',', ':'))}{end}" for frame in frames]
    stream = "".join([*lines, f": a comment{end}", f"data: [DONE]{end}"]).encode()
    answer = json.dumps({"choices": whole, "usage": used}).encode()
    read = read_stream(stream, "chat", reads_logprobs=True)
    assert read == read_whole(answer, "chat", reads_logprobs=True)
    assert read.tokens == Tokens(9, 5, 4) == tokens_alone(answer)

    cleaned = clean_stream(stream, usage=True, logprobs=True)
    assert b"usage" not in cleaned and b'"logprob"' not in cleaned
    told = [json.loads(event[6:])["choices"][0] for event in cleaned.split(b"\n\n") if event.startswith(b"data: {")]
    assert all(choice.get("finish_reason") or any(choice["delta"].values()) for choice in told)
    again = read_stream(cleaned, "chat", reads_logprobs=True)
    assert [(c.text, c.calls) for c in again.summary.choices] == [(c.text, c.calls) for c in read.summary.choices]

    for hides in (True, False):
        tap, frames_seen, passed = UsageTap(hides), FrameBuffer(), b""
        start = 0
        while start < len(stream):
            stop = start + rng.randint(1, 200)
            if held := frames_seen.push(stream[start:stop]):
                passed += tap(held)
            start = stop
        assert tap.tokens == Tokens(9, 5, 4)
        assert passed == stream if not hides else b"usage" not in passed and passed.endswith(b"[DONE]" + end.encode())


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["chat", "completions", "responses"]), anything | st.dictionaries(words, anything, max_size=5))
def test_an_answer_of_any_shape_is_read_or_is_said_to_be_unreadable(dialect: Any, answer: Any) -> None:
    body = json.dumps(answer).encode()
    with contextlib.suppress(UnreadableError):
        read_whole(body, dialect, reads_logprobs=True)
    with contextlib.suppress(UnreadableError, BrokenStreamError):
        read_stream(b"data: " + body + b"\n\ndata: [DONE]\n\n", dialect, reads_logprobs=True)
    tokens_alone(body)
    tap = UsageTap(True)
    tap(b'data: {"usage":{}, "x": ' + body + b"}\n\n")
    tap(b"data: " + body + b"\n\n")
    assert tap.tokens is None or isinstance(tap.tokens, Tokens)

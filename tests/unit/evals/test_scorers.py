"""Each scorer on right, wrong and unreadable answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferloop.evals.reply import read_stream, read_whole
from inferloop.evals.scorer import Observation, Reply, needs, same_json, score
from inferloop.evals.suite import Case, CaseKind


def case(kind: CaseKind, expect: Any, prompt: str = "p") -> Case:
    return Case(id="c", kind=kind, why="w", expect=expect, prompt=prompt)


def says(text: str | None, status: int = 200, **more: Any) -> Observation:
    return Observation(reply=Reply(status, text, **more))


@pytest.mark.parametrize(
    ("kind", "expect", "text", "value"),
    [
        ("exact", "ab", "ab", 1.0),
        ("exact", "ab", "ab ", 0.0),
        ("exact", "é", "e\u0301", 0.0),
        ("contains", ("Rome", "Italy"), "Rome, Italy", 1.0),
        ("contains", ("Rome", "Italy"), "Rome", 0.0),
        ("regex", r"^\d+$", "123", 1.0),
        ("regex", r"^\d+$", "123x", 0.0),
        ("json", {"a": [1, "é"]}, ' {"a": [1.0, "\\u00e9"]} ', 1.0),
        ("json", {"a": 1}, '{"a": true}', 0.0),
        ("json", {"a": 1}, '{"a": 1', 0.0),
        ("json", None, "null", 1.0),
        ("json", [], "[" * 100_000, 0.0),
    ],
)
def test_answers(kind: CaseKind, expect: Any, text: str, value: float) -> None:
    result = score(case(kind, expect), says(text))
    assert (result.status, result.value) == ("scored", value)
    assert bool(result.reason) == (value == 0.0)


@pytest.mark.parametrize("kind", ["exact", "contains", "regex", "json"])
def test_an_error_is_not_a_wrong_answer_and_neither_is_a_strange_shape(kind: CaseKind) -> None:
    assert score(case(kind, "x"), says(None, status=500)).status == "errored"
    strange = score(case(kind, "x"), says(None, body_problem="no choices"))
    assert (strange.status, strange.value, strange.reason) == ("unparsed", None, "no choices")


def test_json_booleans_are_not_numbers_at_any_depth() -> None:
    assert not same_json([{"a": 1}], [{"a": True}])
    assert not same_json(0, False)
    assert same_json({"b": [], "a": 1}, {"a": 1.0, "b": []})
    assert not same_json([1, 2], [1])


def test_template_ids_name_the_first_difference() -> None:
    wanted = case("template", [1, 2, 3, 4])
    assert score(wanted, Observation(token_ids=(1, 2, 3, 4))).value == 1.0
    off = score(wanted, Observation(token_ids=(1, 2, 9, 4)))
    assert off.value == 0.0 and "first difference at 2: [9, 4] instead of [3, 4]" in off.reason
    assert "first difference at 3" in score(wanted, Observation(token_ids=(1, 2, 3))).reason


def test_protocol_names_every_check_that_fails() -> None:
    wanted = case("protocol", {"finish_reason": "stop", "lacks": [" five"], "completion_tokens": 4})
    good = says(" four", finish_reason="stop", completion_tokens=4)
    bad = says(" four five", finish_reason="length", completion_tokens=5)
    assert score(wanted, good).value == 1.0
    reason = score(wanted, bad).reason
    assert "finish_reason is 'length'" in reason and "' five'" in reason and "completion_tokens is 5" in reason


def test_a_refusal_must_have_its_status_and_name_its_field() -> None:
    wanted = case("protocol", {"status": 400, "param": "temperature"})
    assert score(wanted, says(None, status=400, error_param="temperature")).value == 1.0
    assert score(wanted, says(None, status=400, error_param=None)).value == 0.0
    assert score(wanted, says("hello")).value == 0.0, "accepting a bad value is wrong"
    assert score(wanted, says(None, status=500)).value == 0.0, "a crash is not a refusal"
    assert score(wanted, says(None, status=400, body_problem="no error object")).status == "unparsed"


def test_usage_must_agree_with_the_tokenizer_and_add_up() -> None:
    wanted = case("protocol", {"usage_exact": True})
    assert needs(wanted) == {"reply", "token_ids"}

    def seen(prompt: int | None, completion: int, total: int) -> Observation:
        reply = Reply(200, "x", prompt_tokens=prompt, completion_tokens=completion, total_tokens=total)
        return Observation(reply=reply, token_ids=(5, 6, 7))

    assert score(wanted, seen(3, 2, 5)).value == 1.0
    assert "/tokenize counts 3" in score(wanted, seen(4, 2, 6)).reason
    assert "parts sum to 5" in score(wanted, seen(3, 2, 6)).reason
    assert score(wanted, seen(None, 2, 6)).value == 0.0


def test_streaming_must_equal_not_streaming() -> None:
    wanted = case("protocol", {"stream_equal": True})
    whole = Reply(200, "ab", "stop", 3, 2, 5)
    assert score(wanted, Observation(whole, whole)).value == 1.0
    assert "streamed text" in score(wanted, Observation(whole, Reply(200, "a", "stop", 3, 2, 5))).reason
    cut = Reply(200, "ab", body_problem="the stream ended without [DONE]")
    assert "without [DONE]" in score(wanted, Observation(whole, cut)).reason


def test_a_round_trip_needs_no_generation() -> None:
    wanted = case("protocol", {"round_trip": True}, prompt="ça 😀")
    assert needs(wanted) == {"round_trip"}
    assert score(wanted, Observation(round_trip="ça 😀")).value == 1.0
    assert score(wanted, Observation(round_trip="ça \ufffd")).value == 0.0


CHAT = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}


def test_whole_answers_are_read() -> None:
    assert read_whole(200, json.dumps(CHAT).encode()) == Reply(200, "hi", "stop", 3)
    assert read_whole(200, b'{"choices": [{"text": "t", "finish_reason": "length"}]}') == Reply(200, "t", "length")
    assert read_whole(400, b'{"error": {"param": "top_p", "message": "m"}}') == Reply(400, error_param="top_p")


DEEP = b"[" * 100_000
STRANGE = [
    *[(200, b"<html>"), (200, b"[]"), (200, b"{}"), (200, b'{"choices": []}'), (200, b""), (200, DEEP), (500, DEEP)],
    *[(200, b'{"choices": [{"text": %s}]}' % text) for text in (b"5", b"[]", b'{"a": "b"}')],
]


@pytest.mark.parametrize(("status", "body"), [*STRANGE, (400, b'{"detail": "x"}'), (502, b"bad gateway")])
def test_strange_bodies_are_problems_not_exceptions(status: int, body: bytes) -> None:
    assert read_whole(status, body).body_problem
    if body not in (b"", b'{"choices": []}'):  # in a stream these are a comment's worth, or usage alone
        assert read_stream(status, b"data: " + body + b"\n\ndata: [DONE]\n\n").body_problem


def sse(*frames: Any, end: str = "\n\n") -> bytes:
    return "".join(f"data: {f if isinstance(f, str) else json.dumps(f)}{end}" for f in frames).encode()


def chat_frame(content: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish}], "usage": None}


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_streams_are_joined(end: str) -> None:
    last = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}
    body = (
        b": ping"
        + end.encode()
        + sse(chat_frame(None), chat_frame("a "), chat_frame("é", "stop"), last, "[DONE]", end=end)
    )
    assert read_stream(200, body) == Reply(200, "a é", "stop", 3, 2, 5)


def test_a_stream_that_breaks_off_or_reports_an_error_is_a_problem() -> None:
    assert "without [DONE]" in str(read_stream(200, sse(chat_frame("a", "stop"))).body_problem)
    assert "error event" in str(read_stream(200, sse({"error": {"message": "boom"}}, "[DONE]")).body_problem)
    assert "not a frame" in str(read_stream(200, sse("{", "[DONE]")).body_problem)
    assert read_stream(400, b'{"error": {"param": "n"}}').error_param == "n"

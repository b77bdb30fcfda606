"""Structured output of the real model: what ended by itself keeps to what was asked, whoever runs beside."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad", "bored"]},
        "home": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "floor": {"type": "integer"}},
            "required": ["city", "floor"],
            "additionalProperties": False,
        },
        "marks": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 6},
            "minItems": 2,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "mood", "home", "marks"],
    "additionalProperties": False,
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{url}/v1/{path}",
        json.dumps({"model": "smollm2-135m-instruct", **body}).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def chat(url: str, text: str, **fields: Any) -> tuple[str, str, dict[str, Any]]:
    """(content, finish reason, the choice)"""
    messages = [{"role": "user", "content": text}]
    status, answer = post(url, "chat/completions", {"messages": messages, "max_tokens": 200, **fields})
    assert status == 200, answer
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], choice


def check_person(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["name", "age", "mood", "home", "marks"]
    assert isinstance(found["name"], str) and len(found["name"]) <= 20
    assert type(found["age"]) is int and 0 <= found["age"] <= 120
    assert found["mood"] in ("happy", "sad", "bored")
    assert set(found["home"]) == {"city", "floor"} and type(found["home"]["floor"]) is int
    assert 2 <= len(found["marks"]) <= 3 and all(type(m) is int and 1 <= m <= 6 for m in found["marks"])


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_schema_is_kept_to(served_model: str, temperature: float) -> None:
    text, reason, _ = chat(
        served_model, "Describe a person.", response_format=SCHEMA_FORMAT, temperature=temperature, seed=3
    )
    assert reason == "stop"
    check_person(text)


def test_any_object(served_model: str) -> None:
    schema = {"type": "object", "maxProperties": 2, "additionalProperties": {"type": "integer", "maximum": 99}}
    for asked in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json": schema}}):
        text, reason, _ = chat(served_model, "Answer with a JSON object of one number.", temperature=0, **asked)
        assert text.startswith("{")
        if reason == "stop":
            assert isinstance(json.loads(text), dict)
        else:
            assert reason == "length"


def test_regex_and_grammar_on_completions(served_model: str) -> None:
    for asked, pattern in (({"regex": DATE}, DATE), ({"grammar": 'start: "yes" | "no"'}, "yes|no")):
        body = {"prompt": "Is today the day?", "structured_outputs": asked, "temperature": 1.2, "seed": 5}
        status, answer = post(served_model, "completions", body)
        assert status == 200, answer
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"]), choice


def test_structured_and_free_requests_do_not_disturb_each_other(served_model: str) -> None:
    def free() -> tuple[str, str, dict[str, Any]]:
        return chat(served_model, "Count to ten.", temperature=0, max_tokens=24, logprobs=True, top_logprobs=20)

    def person(seed: int) -> tuple[str, str, dict[str, Any]]:
        return chat(served_model, "Describe a person.", response_format=SCHEMA_FORMAT, seed=seed)

    def date(seed: int) -> tuple[str, str, dict[str, Any]]:
        fields = {"structured_outputs": {"regex": DATE}, "seed": seed, "logprobs": True, "top_logprobs": 20}
        return chat(served_model, "Name a date.", **fields)

    with ThreadPoolExecutor(8) as pool:
        free_ones = [pool.submit(free) for _ in range(2)]
        people = [pool.submit(person, seed) for seed in range(3)]
        dates = [pool.submit(date, seed) for seed in range(3)]
    for text, reason, _ in (p.result() for p in people):
        assert reason == "stop"
        check_person(text)
    for text, reason, choice in (d.result() for d in dates):
        assert reason == "stop" and re.fullmatch(DATE, text)
        # what the mask forbids has probability 0, which JSON can only hold as a very small number
        assert all(-10_000 <= top["logprob"] <= 0 for c in choice["logprobs"]["content"] for top in c["top_logprobs"])
    for text, _, choice in (f.result() for f in free_ones):
        assert not text.startswith("{") and not re.fullmatch(DATE, text)
        chosen = [c["top_logprobs"][19]["logprob"] for c in choice["logprobs"]["content"]]
        assert min(chosen) > -1000  # nothing was masked


def test_cuts_are_told(served_model: str) -> None:
    text, reason, _ = chat(served_model, "Describe a person.", response_format=SCHEMA_FORMAT, max_tokens=5)
    assert reason == "length" and text.startswith("{")
    text, reason, _ = chat(served_model, "Describe a person.", response_format=SCHEMA_FORMAT, stop=['"age"'])
    assert reason == "stop" and text.startswith("{") and '"age"' not in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs.regex"),  # found on the way only
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_grammars_are_named(served_model: str, fields: dict[str, Any], param: str, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, **fields}
    status, answer = post(served_model, "chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)

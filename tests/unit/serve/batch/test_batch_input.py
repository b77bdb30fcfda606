"""The input of a batch: every mistake is told with its line, and what was told to be right can be read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferloop.backends.scripted import ScriptedGenerator
from inferloop.serve.batch import input as input_module
from inferloop.serve.batch.input import Checked, check_rows, read_body
from inferloop.serve.wire import parse_chat

CHAT = "/v1/chat/completions"
INFO = ScriptedGenerator(model_id="m").describe()[0]


def line(custom_id: str, **changes: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": "ünï"}], **changes.pop("body", {})}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes})


def check(path: Path, text: str | bytes, max_body_bytes: int = 10_000) -> Checked:
    def check_body(body: bytes) -> int:
        return parse_chat(body, INFO).num_per_prompt

    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return check_rows(path, CHAT, check_body, max_body_bytes=max_body_bytes, rest=lambda _: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_right_rows_are_found_again_by_their_place(path: Path, end: str) -> None:
    text = end.join([line("a"), "", line("b", body={"n": 3}), "  ", line("ç")])  # no newline at the end of the file
    checked = check(path, text)
    assert checked.all_errors() == []
    assert [(r.number, r.custom_id, r.num_choices) for r in checked.rows] == [(1, "a", 1), (3, "b", 3), (5, "ç", 1)]
    bodies = [json.loads(read_body(path, row)) for row in checked.rows]
    assert [body.get("n") for body in bodies] == [None, 3, None]
    assert all(body["messages"][0]["content"] == "ünï" for body in bodies)


def test_a_byte_order_mark_is_no_part_of_the_first_row(path: Path) -> None:
    checked = check(path, b"\xef\xbb\xbf" + line("a").encode() + b"\r\n" + line("b").encode())
    assert checked.all_errors() == [] and [row.custom_id for row in checked.rows] == ["a", "b"]
    assert all(json.loads(read_body(path, row))["model"] == "m" for row in checked.rows)


def test_every_wrong_line_is_told(path: Path) -> None:
    wrong = [
        (line("twice"), None),
        ("{", "invalid_json"),
        (line("twice"), "duplicate_custom_id"),
        (line("b", url="/v1/completions"), "mismatched_url"),
        (line("c", method="GET"), "invalid_value"),
        (line("d", body={"model": "other"}), "model_not_found"),
        (line("e", body={"temperature": 9}), "invalid_value"),
        (line("f", body={"temprature": 1}), "unknown_parameter"),
        (line("", body={}), "invalid_value"),
        (json.dumps({"custom_id": "g", "method": "POST", "url": CHAT}), "missing_required_parameter"),
        (line("h", extra=1), "unknown_parameter"),
        (line("i" * 600), "invalid_value"),
        ('{"custom_id": "\\ud800", "method": "POST", "url": "/v1/chat/completions", "body": {}}', "invalid_value"),
        ("[1]", "invalid_value"),
        ('{"custom_id": "n", "method": "POST", "url": "/v1/chat/completions", "body": ' + "[" * 5000, "invalid_json"),
        (line("ok"), None),
    ]
    checked = check(path, "\n".join(text for text, _ in wrong).encode() + b'\n{"custom_id": "\xff"}\n')
    told = {error.line: error.code for error in checked.all_errors()}
    assert told == {i: code for i, (_, code) in enumerate(wrong, 1) if code} | {len(wrong) + 1: "invalid_json"}
    assert "line 1" in next(e.message for e in checked.errors if e.code == "duplicate_custom_id")
    assert next(e.param for e in checked.errors if e.line == 7) == "temperature"


def test_a_line_that_is_too_long_costs_no_memory_and_no_other_line(path: Path) -> None:
    long = line("long", body={"user": "x" * 50_000})
    checked = check(path, "\n".join([line("a"), long, line("b")]))
    assert [(e.line, e.code) for e in checked.errors] == [(2, "line_too_long")]
    assert [r.number for r in checked.rows] == [1, 3]
    assert json.loads(read_body(path, checked.rows[1]))["model"] == "m"


def test_bounds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_module, "MAX_ROWS", 3)
    monkeypatch.setattr(input_module, "MAX_ERRORS", 2)
    checked = check(path, "\n".join(line(f"r{i}") for i in range(9)))
    assert [(e.line, e.code) for e in checked.all_errors()] == [(4, "too_many_rows")]
    errors = check(path, "{\n{\n{\n").all_errors()
    assert [(e.line, e.code) for e in errors] == [(1, "invalid_json"), (2, "invalid_json"), (None, "more_errors")]
    assert errors[-1].message.startswith("1 more")


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_an_empty_file_is_wrong(path: Path, text: str) -> None:
    assert [(e.line, e.code) for e in check(path, text).all_errors()] == [(None, "empty_file")]

"""Answers that are not streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferloop.bench.plain import PlainReader
from inferloop.bench.stream import StreamResult

ANSWER = {
    "choices": [{"message": {"content": "four words of text"}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}},
}


def read(body: bytes, *, cut: bool = False, step: int = 7) -> StreamResult:
    reader = PlainReader()
    for i in range(0, len(body), step):
        reader.feed(100 + i, body[i : i + step])
    return reader.finish(cut=cut)


def test_all_tokens_come_with_the_last_byte() -> None:
    body = json.dumps(ANSWER).encode()
    for step in (1, 7, len(body)):
        found = read(body, step=step)
        assert found.times_ns == (100 + (len(body) - 1) // step * step,)
        assert (found.counts, found.num_input_tokens, found.num_output_tokens) == ((4,), 9, 4)
        assert (found.num_cached_tokens, found.finish_reason, found.error) == (8, "length", None)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"choices": [{"text": "a"}]}, None),
        ({"choices": [{"text": ""}]}, "empty_stream"),
        ({"choices": []}, "protocol"),
        ({"error": {"message": "no"}}, "protocol"),
        ({"choices": [{"text": "a"}], "usage": {"completion_tokens": -1}}, "protocol"),
        (5, "protocol"),
    ],
)
def test_its_error_class(body: Any, error: str | None) -> None:
    assert read(json.dumps(body).encode()).error == error
    assert read(json.dumps(body).encode(), cut=True).error == "truncated"

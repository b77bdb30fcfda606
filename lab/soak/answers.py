"""Answers in one form, whole or streamed, so that two of them can be compared to the last character.

Left out is what may differ between two equal answers: ids, times, and how much of the prompt was cached.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Answer = dict[str, Any]
_VOLATILE = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "prompt_tokens_details",
    "input_tokens_details",
    "inferloop",
}


class BrokenAnswerError(Exception):
    """A 200 whose body is not what its endpoint promises."""


def whole(body: bytes) -> Answer:
    """Raises BrokenAnswerError."""
    try:
        found = json.loads(body)
    except ValueError as error:
        raise BrokenAnswerError(f"not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("error"):
        raise BrokenAnswerError(f"no answer: {body[:200]!r}")
    return _plain_answer(found)


def streamed(body: bytes) -> Answer:
    """What the chunks add up to, in the form of a whole answer. Raises BrokenAnswerError, also for a stream that does
    not end as it must."""
    events = list(_events(body))
    if events and isinstance(events[0], dict) and "type" in events[0]:
        return _of_responses(events)
    if not events or events[-1] != "[DONE]":
        raise BrokenAnswerError(f"the stream has no end: {body[-200:]!r}")
    chunks = [event for event in events[:-1] if isinstance(event, dict)]
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            merged = choices.setdefault(choice["index"], {"index": choice["index"], "finish_reason": None})
            if merged["finish_reason"] is not None:
                raise BrokenAnswerError(f"choice {choice['index']} goes on after its end")
            _merge(merged, {("message" if k == "delta" else k): v for k, v in choice.items() if k != "index"})
    if any(choice["finish_reason"] is None for choice in choices.values()):
        raise BrokenAnswerError("a choice has no end")
    answer = {"object": chunks[0]["object"].removesuffix(".chunk"), "model": chunks[0]["model"], "usage": usage}
    return _plain_answer({**answer, "choices": [choices[index] for index in sorted(choices)]})


def difference(found: Any, expected: Any, path: str = "") -> str | None:
    """Where two answers differ first. Usage counts only where both have it: a stream tells it on demand."""
    if isinstance(found, dict) and isinstance(expected, dict):
        skipped = {key for key in ("usage",) if found.get(key) is None or expected.get(key) is None}
        keys = sorted((found.keys() | expected.keys()) - skipped)
        pairs = ((f"{path}.{key}", found.get(key), expected.get(key)) for key in keys)
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = ((f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(found, expected, strict=True)))
    else:
        same = found == expected or all(value in ("", [], None) for value in (found, expected))  # all say: nothing
        return None if same else f"{path}: {str(found)[:200]!r} instead of {str(expected)[:200]!r}"
    return next((where for key, a, b in pairs if (where := difference(a, b, key))), None)


def _events(body: bytes) -> Iterator[dict[str, Any] | str]:
    for block in body.decode().split("\n\n"):
        data = "".join(line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: "))
        if data == "[DONE]":
            yield data
        elif data:
            event = json.loads(data)
            if event.get("error"):
                raise BrokenAnswerError(f"the stream ends with an error: {data[:200]}")
            yield event


def _of_responses(events: list[dict[str, Any] | str]) -> Answer:
    last = next((e for e in reversed(events) if isinstance(e, dict)), {})
    if last.get("type") not in ("response.completed", "response.incomplete"):
        raise BrokenAnswerError(f"the stream ends with {last.get('type')}")
    return _plain_answer(last["response"])


def _merge(into: dict[str, Any], piece: dict[str, Any]) -> None:
    """Texts and lists are appended, objects merged, all else replaced; tool_calls are joined by their index."""
    for key, value in piece.items():
        before = into.get(key)
        if key == "tool_calls" and value:
            calls = into[key] = before or []
            for call in value:
                while len(calls) <= call["index"]:
                    calls.append({})
                _merge(calls[call["index"]], {k: v for k, v in call.items() if k != "index"})
        elif isinstance(value, dict) and isinstance(before, dict):
            _merge(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            before.extend(value)
        elif isinstance(value, str) and isinstance(before, str) and key not in ("role", "finish_reason", "type", "id"):
            into[key] = before + value
        elif value is not None or before is None:
            into[key] = value


def _plain_answer(answer: dict[str, Any]) -> Answer:
    return {key: _plain(value) for key, value in answer.items() if key not in _VOLATILE}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k not in _VOLATILE}
    return [_plain(item) for item in value] if isinstance(value, list) else value

"""OpenAI answers, whole or streamed, read into a Reply. Pure: bytes in, value out; never raises on a strange body."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from inferloop.evals.scorer import Reply


def read_whole(status: int, body: bytes) -> Reply:
    """An unstreamed answer or an error object."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return Reply(status, body_problem=f"the body is not JSON: {body[:80]!r}")
    if not isinstance(data, dict):
        return Reply(status, body_problem="the body is not a JSON object")
    if status != 200:
        error = data.get("error")
        if not isinstance(error, dict):
            return Reply(status, body_problem="an error without an error object")
        return Reply(status, error_param=error.get("param"))
    try:
        choice = data["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        if not isinstance(text, str | None):
            raise TypeError("the text is not a string")
        return _with_usage(Reply(status, text, choice.get("finish_reason")), data.get("usage"))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        return Reply(status, body_problem=f"not an OpenAI answer: {type(error).__name__} {error}")


def read_stream(status: int, body: bytes) -> Reply:
    """A finished `text/event-stream` body: the texts joined, the last finish reason and usage. A stream that does not
    end with [DONE], or that carries an error event, is a body problem."""
    if status != 200:
        return read_whole(status, body)
    text, finish_reason, usage, done = "", None, None, False
    for event in body.decode("utf-8", errors="replace").replace("\r\n", "\n").split("\n\n"):
        data = "\n".join(line[5:].removeprefix(" ") for line in event.split("\n") if line.startswith("data:"))
        if not data:
            continue
        if data == "[DONE]":
            done = True
            continue
        try:
            frame = json.loads(data)
            if "error" in frame:
                return Reply(status, body_problem=f"an error event: {frame['error']}")
            usage = frame.get("usage") or usage
            for choice in frame["choices"]:
                piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
                text += "" if piece is None else piece
                finish_reason = choice.get("finish_reason") or finish_reason
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            return Reply(status, body_problem=f"not a frame: {type(error).__name__} in {data[:80]!r}")
    if not done:
        return Reply(status, text=text, body_problem="the stream ended without [DONE]")
    return _with_usage(Reply(status, text, finish_reason), usage)


def _with_usage(reply: Reply, usage: Any) -> Reply:
    found = usage if isinstance(usage, dict) else {}
    prompt, completion, total = (
        value if isinstance(value := found.get(name), int) else None
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    return replace(reply, prompt_tokens=prompt, completion_tokens=completion, total_tokens=total)

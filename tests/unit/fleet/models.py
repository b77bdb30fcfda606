"""Stubs that answer like models, and what their answers say."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from tests.unit.fleet.stubs import Asked, Handler, Talk, answers

SHAPE = {"type": "object", "properties": {"sky": {"type": "string"}}, "required": ["sky"]}
GOOD, BROKEN = '{"sky": "blue"}', '{"sky": "bl'
JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}

TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "now"}}]}


def usage(num_input: int, num_output: int, num_cached: int = 0) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": num_cached}}
    return {"prompt_tokens": num_input, "completion_tokens": num_output, **details}


def says(
    text: str,
    *,
    calls: dict[str, str] | None = None,
    logprobs: list[float] | None = None,
    counts: dict[str, Any] | None = None,
    before: Callable[[Talk], Awaitable[None]] | None = None,
) -> Handler:
    """A model that answers every chat or completion so, whole or streamed, with its usage."""
    used = counts or usage(100, 10, 40)

    async def handle(asked: Asked, talk: Talk) -> None:
        if before is not None:
            await before(talk)
        body = json.loads(asked.body)
        told = {"content": [{"token": "x", "logprob": value} for value in logprobs or ()]}
        shown = told if body.get("logprobs") else None
        made = [
            {"id": "c", "index": i, "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate((calls or {}).items())
        ]
        if not body.get("stream"):
            message = {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}
            choice = {"index": 0, "message": message, "logprobs": shown, "finish_reason": "stop"}
            await talk.json(200, json.dumps({"model": body["model"], "choices": [choice], "usage": used}).encode())
            return
        asks = body.get("stream_options", {}).get("include_usage")
        extra: dict[str, Any] = {"usage": None} if asks else {}
        deltas = [{"content": text[:3]}, {"content": text[3:]}, *({"tool_calls": [call]} for call in made)]
        frames = [{"choices": [{"index": 0, "delta": d, "logprobs": shown}], **extra} for d in deltas]
        frames += [{"choices": [], "usage": used}] if asks else []
        await talk.sse(*(json.dumps(frame, separators=(",", ":")) for frame in frames), "[DONE]")
        await talk.end()

    return handle


def refuses(status: int) -> Handler:
    return answers(status, b'{"error": {"message": "no"}}')


def chunks(text: bytes) -> list[Any]:
    return [json.loads(event[6:]) for event in text.split(b"\n\n") if event and event != b"data: [DONE]"]


def content(text: bytes) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks(text) if c.get("choices"))


def said(text: bytes) -> str:
    """Of a whole answer or a stream."""
    return content(text) if text.startswith(b"data:") else json.loads(text)["choices"][0]["message"]["content"]

"""OpenAI chat messages brought to the plain form that chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inferloop.core.errors import RequestError


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies with string content: null becomes "", text parts are joined by newlines; tool-call arguments become
    objects. Mutates nothing. Raises RequestError naming the message for anything else."""
    if not messages:
        raise RequestError("at least one message is needed", param="messages")
    return [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalize(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object", param="messages")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f"{where}.role must be text", param="messages")
    out = {**message, "content": _content(message.get("content"), f"{where}.content")}
    calls = out.get("tool_calls")
    if calls:
        if isinstance(calls, str) or not isinstance(calls, Sequence):
            raise RequestError(f"{where}.tool_calls must be a list", param="messages")
        out["tool_calls"] = [_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return out


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be text, a list of text parts, or null", param="messages")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text"):
        raise RequestError(f"{where} is of type {kind!r}; only text parts are supported", param="messages")
    assert isinstance(part, Mapping)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text must be text", param="messages")
    text: str = part["text"]
    return text


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f"{where} must be an object with a function", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # the wire has JSON text, templates expect the object
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{where}.function.arguments is not valid JSON", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}

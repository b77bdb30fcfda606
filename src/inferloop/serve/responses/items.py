"""The input of /v1/responses: a text, or messages, calls of functions and what those gave back, as chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from inferloop.core.errors import RequestError
from inferloop.serve.no_op import NoOp, check_no_op
from inferloop.serve.wire import Unused

ItemType = Literal["message", "function_call", "function_call_output"]
_FIELDS: dict[ItemType, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class InputPart(Struct, forbid_unknown_fields=True, kw_only=True):
    """The last two fields let a client send our own answer back as it came."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: NoOp = None
    logprobs: Unused = None


class InputItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """A message has role and content; a function_call has call_id, name and arguments; a function_call_output has
    call_id and output. The last three fields let a client send our own answer back as it came."""

    type: ItemType | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    id: Unused = None
    status: Unused = None
    phase: Unused = None


def messages_of(instructions: str | None, given: str | list[InputItem]) -> tuple[dict[str, Any], ...]:
    """What a chat template takes; `instructions` come first. Raises RequestError naming the item."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return (*messages, {"role": "user", "content": given})
    called: set[str | None] = set()
    for i, item in enumerate(given):
        where = f"input[{i}]"
        _check_fields(item, where)
        if item.type == "function_call":
            _add_call(messages, item, where)
            called.add(item.call_id)
        elif item.type == "function_call_output":
            if item.call_id not in called:
                message = f"{where} is the output of the call {item.call_id!r}, which is not among the items before it"
                raise RequestError(message, param=f"{where}.call_id")
            content = _text(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        else:
            # developer is OpenAI's newer name for system; templates know only the older one
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content, f"{where}.content")})
    return tuple(messages)


def _add_call(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Calls are part of the assistant's turn, which may hold a text and other calls before them."""
    try:
        arguments = json.loads(item.arguments or "")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.arguments must be a JSON object", param=f"{where}.arguments")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item.name, "arguments": item.arguments}
    messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _check_fields(item: InputItem, where: str) -> None:
    kind: ItemType = item.type or "message"
    mine = _FIELDS[kind]
    for field in mine:
        if getattr(item, field) is None:
            raise RequestError(
                f"{where}.{field} is required", param=f"{where}.{field}", code="missing_required_parameter"
            )
    for field in ("role", "content", "call_id", "name", "arguments", "output"):
        if field not in mine and getattr(item, field) is not None:
            raise RequestError(f"{where}.{field} does not belong to a {kind}", param=f"{where}.{field}")


def _text(content: str | Sequence[InputPart] | None, where: str) -> str:
    assert content is not None, "checked before"
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        check_no_op(part.annotations, ([],), f"{where}[{i}].annotations")
    return "\n".join(part.text for part in content)

"""The input of /v1/responses: a text, or messages, reasoning, calls and what those gave back, as chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from inferloop.core.errors import RequestError
from inferloop.serve.no_op import NoOp, ReadByClient, check_no_op
from inferloop.serve.tools import FunctionName, check_depth
from inferloop.serve.wire import Unused

ItemType = Literal["message", "reasoning", "function_call", "function_call_output"]
_FIELDS: dict[ItemType, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": ("content",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class InputPart(Struct, forbid_unknown_fields=True, kw_only=True):
    """The last two fields let a client send our own answer back as it came."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: NoOp = None
    logprobs: Unused = None
    parsed: ReadByClient = None


class InputItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """A message has role and content, reasoning has content; a function_call has call_id, name and arguments; a
    function_call_output has call_id and output. The last fields let a client send our own answer back as it came."""

    type: ItemType | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: NoOp = None
    encrypted_content: NoOp = None
    namespace: NoOp = None
    caller: NoOp = None
    async_: NoOp = None
    id: Unused = None
    status: Unused = None
    phase: Unused = None
    parsed_arguments: ReadByClient = None


def messages_of(instructions: str | None, given: str | list[InputItem]) -> tuple[dict[str, Any], ...]:
    """What a chat template takes; `instructions` come first. Raises RequestError naming the item."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return (*messages, {"role": "user", "content": given})
    called: dict[str | None, str | None] = {}  # names by id
    for i, item in enumerate(given):
        where = f"input[{i}]"
        _check_fields(item, where)
        if item.type == "function_call":
            _add_call(messages, item, where)
            called[item.call_id] = item.name
        elif item.type == "function_call_output":
            if item.call_id not in called:
                message = f"{where} is the output of the call {item.call_id!r}, which is not among the items before it"
                raise RequestError(message, param=f"{where}.call_id")
            content = _text(item.output, f"{where}.output")
            name = called[item.call_id]
            messages.append({"role": "tool", "content": content, "name": name, "tool_call_id": item.call_id})
        elif item.type == "reasoning":
            text = _text(item.content, f"{where}.content", ("reasoning_text",))
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        else:
            # developer is OpenAI's newer name for system; templates know only the older one
            role = "system" if item.role == "developer" else item.role
            _add_text(messages, str(role), _text(item.content, f"{where}.content"))
    return tuple(messages)


def _add_text(messages: list[dict[str, Any]], role: str, text: str) -> None:
    """What an assistant says is of one turn with what it thought before."""
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("reasoning_content") and not (last["content"] or last.get("tool_calls")):
        last["content"] = text
    else:
        messages.append({"role": role, "content": text})


def _add_call(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Calls are part of the assistant's turn, which may hold a text and other calls before them."""
    try:
        arguments = json.loads(item.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.arguments must be the text of a JSON object", param=f"{where}.arguments")
    check_depth(arguments, f"{where}.arguments")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item.name, "arguments": arguments}
    messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _check_fields(item: InputItem, where: str) -> None:
    kind: ItemType = item.type or "message"
    mine = _FIELDS[kind]
    for field in mine:
        if getattr(item, field) is None:
            raise RequestError(
                f"{where}.{field} is required", param=f"{where}.{field}", code="missing_required_parameter"
            )
    check_no_op(item.summary, ([],), f"{where}.summary")
    for name in ("encrypted_content", "namespace", "caller", "async_"):
        check_no_op(getattr(item, name), (), f"{where}.{name}")
    for field in ("role", "content", "call_id", "name", "arguments", "output"):
        if field not in mine and getattr(item, field) is not None:
            raise RequestError(f"{where}.{field} does not belong to a {kind}", param=f"{where}.{field}")


def _text(
    content: str | Sequence[InputPart] | None, where: str, types: tuple[str, ...] = ("input_text", "output_text")
) -> str:
    assert content is not None, "checked before"
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in types:
            raise RequestError(f"{where}[{i}] must be {' or '.join(types)}", param=f"{where}[{i}].type")
        check_no_op(part.annotations, ([],), f"{where}[{i}].annotations")
    return "\n".join(part.text for part in content)

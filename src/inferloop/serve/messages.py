"""Messages of a conversation, as they are sent and as a chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from inferloop.core.errors import RequestError
from inferloop.engine.text.template import RESERVED
from inferloop.serve.no_op import NoOp, ReadByClient, check_no_op
from inferloop.serve.tools import FunctionName, check_depth

MAX_VARIABLE_BYTES = 1 << 16
"""Of `chat_template_kwargs`, as JSON."""

TemplateVariables = (
    Annotated[dict[str, Any], Meta(description="Variables that the chat template reads, by name.")] | None
)


class TextPart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """`arguments` is the text of a JSON object; an empty text is none."""

    name: FunctionName
    arguments: str
    parsed_arguments: ReadByClient = None


class CallInMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    id: Annotated[str, Meta(min_length=1)]
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None
    """Accepted, because clients that collect a stream keep it."""


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """The last fields let a client send our own answer back as it came. Only an assistant's message that has
    `tool_calls`, or reasoning that was cut, may do without `content`; `tool_call_id` says which call a tool's message
    answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: list[CallInMessage] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: NoOp = None
    refusal: NoOp = None
    audio: NoOp = None
    annotations: NoOp = None
    parsed: ReadByClient = None


def checked_variables(variables: dict[str, Any] | None) -> dict[str, Any]:
    """What a chat template may read beside the messages. Raises RequestError naming the variable. Whether the template
    reads it is the template's to say."""
    variables = variables or {}
    for name, value in variables.items():
        check_depth(value, f"chat_template_kwargs.{name}")
    size = len(msgspec.json.encode(variables))
    if size > MAX_VARIABLE_BYTES:
        message = f"chat_template_kwargs are {size} bytes of JSON, more than {MAX_VARIABLE_BYTES}"
        raise RequestError(message, param="chat_template_kwargs")
    if reserved := sorted(variables.keys() & RESERVED):
        param = f"chat_template_kwargs.{reserved[0]}"
        raise RequestError(f"{param} is not a caller's to set", param=param)
    return variables


def plain_messages(messages: list[Message]) -> tuple[dict[str, Any], ...]:
    """What a chat template takes. Raises RequestError."""
    plain: list[dict[str, Any]] = []
    called: dict[str, str] = {}  # name by id, of the calls so far
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        _check_fields(message, where)
        plain.append(_plain_message(message, called, where))
        called.update({call.id: call.function.name for call in message.tool_calls or ()})
    return tuple(plain)


def _check_fields(message: Message, where: str) -> None:
    for field in ("function_call", "refusal", "audio"):
        check_no_op(getattr(message, field), (), f"{where}.{field}")
    check_no_op(message.annotations, ([],), f"{where}.annotations")
    of_role = {"tool_call_id": "tool", "tool_calls": "assistant", "reasoning_content": "assistant"}
    for field, role in {**of_role, "reasoning": "assistant"}.items():
        if getattr(message, field) and message.role != role:
            param = f"{where}.{field}"
            raise RequestError(f"{param} belongs to messages of the role {role}", param=param)
    if message.content is None and not (message.tool_calls or message.reasoning_content or message.reasoning):
        param = f"{where}.content"
        raise RequestError(f"{param} is required", param=param, code="missing_required_parameter")


def _plain_message(message: Message, called: Mapping[str, str], where: str) -> dict[str, Any]:
    # developer is OpenAI's newer name for system; templates know only the older one
    role = "system" if message.role == "developer" else message.role
    content = message.content or ""
    plain: dict[str, Any] = {"role": role}
    plain["content"] = content if isinstance(content, str) else "\n".join(p.text for p in content)
    if message.name is not None:
        plain["name"] = message.name
    if reasoning := message.reasoning_content or message.reasoning:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(c, f"{where}.tool_calls[{k}]") for k, c in enumerate(message.tool_calls)]
    if message.role == "tool":
        param = f"{where}.tool_call_id"
        if message.tool_call_id is None:
            raise RequestError(f"{param} is required", param=param, code="missing_required_parameter")
        if message.tool_call_id not in called:
            raise RequestError(f"{param}: no message before this one has a call of that id", param=param)
        plain["tool_call_id"] = message.tool_call_id
        plain.setdefault("name", called[message.tool_call_id])
    return plain


def _plain_call(call: CallInMessage, where: str) -> dict[str, Any]:
    """Templates take arguments as an object."""
    param = f"{where}.function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{param} must be the text of a JSON object", param=param)
    check_depth(arguments, param)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}

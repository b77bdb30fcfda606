"""Messages of a conversation, as they are sent and as a chat template takes them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from inferloop.serve.no_op import NoOp, check_no_op


class TextPart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """The last five fields let a client send our own answer back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    tool_calls: NoOp = None
    function_call: NoOp = None
    refusal: NoOp = None
    audio: NoOp = None
    annotations: NoOp = None


def plain_messages(messages: list[Message]) -> tuple[dict[str, Any], ...]:
    """What a chat template takes. Raises RequestError."""
    return tuple(_plain_message(i, message) for i, message in enumerate(messages))


def _plain_message(i: int, message: Message) -> dict[str, Any]:
    for field, accepted in (("tool_calls", ([],)), ("function_call", ()), ("refusal", ()), ("audio", ())):
        check_no_op(getattr(message, field), accepted, f"messages[{i}].{field}")
    check_no_op(message.annotations, ([],), f"messages[{i}].annotations")
    # developer is OpenAI's newer name for system; templates know only the older one
    role = "system" if message.role == "developer" else message.role
    content = message.content
    return {"role": role, "content": content if isinstance(content, str) else "\n".join(p.text for p in content)}

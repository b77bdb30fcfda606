"""What is offered to a model, and what it calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called. `parameters` is the JSON schema of its arguments, always of an object; `param` is
    the request's field that it came in, which errors name."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    param: str = "tools"

    @property
    def definition(self) -> dict[str, Any]:
        """What chat templates take: OpenAI's form, without what only servers need."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


def argument_text(value: object) -> str | None:
    """Arguments as they are sent: null and an empty text are no arguments, a text may hold the object. None for
    anything that is not a JSON object in the end."""
    if isinstance(value, str):
        try:
            value = json.loads(value, strict=False) if value.strip() else {}
        except (ValueError, RecursionError):
            return None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # infinite numbers
        return None
    # halves of characters have no UTF-8, but JSON has escapes for them
    return text if _is_unicode(text) else json.dumps(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

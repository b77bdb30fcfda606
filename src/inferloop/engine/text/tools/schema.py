"""Pieces of Lark grammars for the arguments of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inferloop.core.errors import RequestError
from inferloop.engine.text.tools.calls import Tool

_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python's json writes it, which is what models have read most."""
_SHARED = ("$defs", "definitions")
_KNOWN_AT_TOP = {"type", "properties", "required", "additionalProperties", "description", "title", "$schema", *_SHARED}


def quoted(text: str) -> str:
    """A Lark string."""
    return json.dumps(text)


def embedded(schema: Mapping[str, Any]) -> str:
    """A schema as it stands behind %json."""
    return json.dumps({**schema, "x-guidance": _WHITESPACE})


def up_to(most: int, rule: str, between: str) -> str:
    """One to `most` times `rule`."""
    return rule if most == 1 else f"{rule} ({quoted(between)} {rule}){{0,{most - 1}}}"


def arguments_schema(tool: Tool) -> str:
    """The schema of a forced call's arguments: only those that are declared, unless it says that others may be."""
    schema = {"type": "object", **(tool.parameters or {})}
    schema.setdefault("properties", {})
    schema.setdefault("additionalProperties", False)
    return embedded(schema)


def argument_schemas(tool: Tool) -> list[tuple[str, bool, str]]:
    """(name, required, schema) of each argument, where they cannot be one object. Raises RequestError when their schema
    says more than that."""
    schema = tool.parameters or {}
    more = sorted(schema.keys() - _KNOWN_AT_TOP)
    if more or schema.get("additionalProperties"):
        word = more[0] if more else "additionalProperties"
        raise RequestError(f"{tool.param}: a call with {word} cannot be forced in this dialect", param=tool.param)
    shared = {key: schema[key] for key in _SHARED if key in schema}
    properties = {name: one for name, one in schema.get("properties", {}).items() if one is not False}
    required = schema.get("required", ())
    if unknown := [name for name in required if name not in properties]:
        message = f"{tool.param}.required: {unknown[0]!r} is not among the properties that there may be"
        raise RequestError(message, param=tool.param)
    return [
        (name, name in required, embedded({**({} if one is True else one), **shared}))
        for name, one in properties.items()
    ]

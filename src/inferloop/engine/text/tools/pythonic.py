"""Calls written as a Python list: `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inferloop.core.errors import RequestError
from inferloop.engine.text.tools.calls import Tool, ToolCall, argument_text
from inferloop.engine.text.tools.literals import NotLiteralError, Reader
from inferloop.engine.text.tools.schema import argument_schemas, quoted, up_to

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_KEYWORD = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class Pythonic:
    name: str = "pythonic"
    quotes: str = "\"'"
    closer: str = ""
    separators: str = " \t\r\n"

    def openers(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"[{name}(" for name in names)

    def read(self, value: str) -> list[ToolCall] | None:
        reader = Reader(value)
        try:
            reader.expect("[")
            calls = reader.items("]", lambda: _call(reader))
            reader.end()
        except NotLiteralError:
            return None
        return calls

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        written = (
            f"{name}({', '.join(f'{k}={_literal(v)}' for k, v in arguments.items())})" for name, arguments in calls
        )
        return f"[{', '.join(written)}]"

    def instruct(self) -> str:
        return (
            "To call functions, answer with a Python list of calls with keyword arguments, in this form:\n"
            "[NAME(ARGUMENT=VALUE, ...), ...]"
        )

    def grammar(self, tools: Sequence[Tool], most: int) -> str:
        rules = [f'calls: "[" {up_to(most, "call", ", ")} "]"']
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, tool in enumerate(tools):
            rules.append(f"call_{i}: {quoted(tool.name + '(')} first_{i}_0 {quoted(')')}")
            rules += _argument_rules(i, tool)
        return "\n".join(rules)

    def guard(self, tools: Sequence[Tool]) -> str | None:
        return None


def _literal(value: Any) -> str:
    """Python's, with the strings in JSON's form, which is the same for both."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _call(reader: Reader) -> ToolCall:
    name = reader.match(_NAME)
    reader.expect("(")
    arguments: dict[str, Any] = {}

    def argument() -> None:
        key = reader.match(_KEYWORD)
        reader.expect("=")
        if key in arguments:
            raise NotLiteralError
        arguments[key] = reader.value()

    reader.items(")", argument)
    text = argument_text(arguments)
    if text is None:
        raise NotLiteralError
    return ToolCall(name, text)


def _argument_rules(i: int, tool: Tool) -> list[str]:
    """Arguments in their declared order, optional ones left out at will: `first_*` where none was written yet,
    `next_*` after one. Values are JSON, which `read` takes as well."""
    arguments = argument_schemas(tool)
    rules = []
    for k, (name, required, schema) in enumerate(arguments):
        if not _KEYWORD.fullmatch(name):
            raise RequestError(f"{tool.param}: {name!r} cannot be an argument in this dialect", param=tool.param)
        one = f"argument_{i}_{k}"
        rules.append(f"{one}: {quoted(name + '=')} value_{i}_{k}")
        rules.append(f"value_{i}_{k}: %json {schema}")
        skip = "" if required else f" | first_{i}_{k + 1}"
        rules.append(f"first_{i}_{k}: {one} next_{i}_{k + 1}{skip}")
        written = f'", " {one}'
        rules.append(f"next_{i}_{k}: {written if required else f'({written})?'} next_{i}_{k + 1}")
    last = len(arguments)
    return [*rules, f'first_{i}_{last}: ""', f'next_{i}_{last}: ""']


PYTHONIC = Pythonic()

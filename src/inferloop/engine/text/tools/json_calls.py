"""The two dialects that write a call as a JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inferloop.engine.text.tools.calls import Tool, ToolCall, argument_text
from inferloop.engine.text.tools.schema import arguments_schema, quoted, up_to

_ANY_ARGUMENTS = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class JsonDialect:
    """`{"name": ..., KEY: {...}}` between `before` and `after`. When reading, either key that models use is taken."""

    name: str
    key: str
    before: str
    after: str
    between: str
    starts: tuple[str, ...]
    closer: str
    separators: str
    quotes: str = '"'

    def openers(self, names: Iterable[str]) -> tuple[str, ...]:
        return self.starts

    def read(self, value: str) -> list[ToolCall] | None:
        try:
            found = json.loads(value, strict=False)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        given = [found[key] for key in ("arguments", "parameters") if key in found]
        # a call without arguments may leave them out, but then nothing else may stand there
        if len(given) > 1 or (not given and found.keys() - {"name", "type", "id"}):
            return None
        arguments = argument_text(given[0] if given else None)
        return None if arguments is None else [ToolCall(found["name"], arguments)]

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return self.between.join(self._write_one(name, arguments) for name, arguments in calls)

    def _write_one(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = json.dumps({"name": name, self.key: arguments}, ensure_ascii=False)
        return f"{self.before}{call}{self.after}"

    def instruct(self) -> str:
        form = f'{self.before}{{"name": NAME, "{self.key}": {{ARGUMENT: VALUE, ...}}}}{self.after}'
        return f"To call a function, answer with one JSON object per call, in this form:\n{form}"

    def grammar(self, tools: Sequence[Tool], most: int) -> str:
        call = f"call: {quoted(self.before)} body" if self.before else "call: body"
        return "\n".join((f"calls: {up_to(most, 'call', self.between)}", call, *self._bodies(tools)))

    def guard(self, tools: Sequence[Tool]) -> str | None:
        if not self.before:
            return None
        opener = self.starts[0]
        call = f"call: opener {quoted(self.before.removeprefix(opener))} body"
        loose = [tool if tool.strict else replace(tool, parameters=_ANY_ARGUMENTS) for tool in tools]
        return "\n".join((call, f"opener[lazy]: TEXT {quoted(opener)}", *self._bodies(loose)))

    def _bodies(self, tools: Sequence[Tool]) -> list[str]:
        rules = ["body: " + " | ".join(f"body_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            head = f'{{"name": {json.dumps(tool.name)}, "{self.key}": '
            rules.append(f"body_{i}: {quoted(head)} arguments_{i} {quoted('}' + self.after)}")
            rules.append(f"arguments_{i}: %json {arguments_schema(tool)}")
        return rules


HERMES = JsonDialect(
    name="hermes",
    key="arguments",
    before="<tool_call>\n",
    after="\n</tool_call>",
    between="\n",
    starts=("<tool_call>",),
    closer="</tool_call>",
    separators=" \t\r\n",
)
LLAMA3_JSON = JsonDialect(
    name="llama3_json",
    key="parameters",
    before="",
    after="",
    between="; ",
    starts=("{", "<|python_tag|>"),
    closer="",
    separators=" \t\r\n;",
)

"""Grammars under which an answer has to be calls."""

from __future__ import annotations

import json
from collections.abc import Sequence

from inferloop.core.request import Grammar
from inferloop.engine.text.depth import is_too_deep
from inferloop.engine.text.tools.calls import Tool
from inferloop.engine.text.tools.dialect import Dialect
from inferloop.engine.text.tools.schema import embedded

MAX_CALLS = 16
"""In one answer; a model that repeats itself comes to an end."""


def forced_calls(dialect: Dialect, tools: Sequence[Tool], *, parallel: bool, param: str) -> Grammar:
    """One call, or with `parallel` several, of `tools`, and no other text. Errors will name `param`; raises
    RequestError naming the tool whose parameters cannot be forced."""
    return Grammar("lark", f"start: calls\n{_rules(dialect, tools, parallel)}", param)


def calls_or_json(dialect: Dialect, tools: Sequence[Tool], answer: Grammar, *, parallel: bool) -> Grammar:
    """As `forced_calls`, or else the value that `answer`, of a JSON kind, asks for. A schema that is none, or nested
    too deeply, is left to whoever compiles it."""
    try:
        schema = json.loads(answer.text) if answer.kind == "json_schema" else {"type": "object"}
    except (ValueError, RecursionError):
        return answer
    if not isinstance(schema, dict) or is_too_deep(schema):
        return answer
    text = f"start: calls | answer\nanswer: %json {embedded(schema)}\n{_rules(dialect, tools, parallel)}"
    return Grammar("lark", text, answer.param)


def strict_calls(dialect: Dialect, tools: Sequence[Tool], *, parallel: bool) -> Grammar | None:
    """Any text, in which calls keep to the schemas of the strict tools among `tools`. None where none is strict, or the
    dialect cannot promise it. Errors name the first strict tool."""
    strict = next((tool for tool in tools if tool.strict), None)
    rules = None if strict is None else dialect.guard(tools)
    if strict is None or rules is None:
        return None
    calls = "call*" if parallel else "call?"
    param = f"{strict.param.removesuffix('.parameters')}.strict"
    return Grammar("lark", f"start: {calls} tail\ntail: TEXT\nTEXT: /(.|\\n)*/\n{rules}", param)


def _rules(dialect: Dialect, tools: Sequence[Tool], parallel: bool) -> str:
    return dialect.grammar(tools, MAX_CALLS if parallel else 1)

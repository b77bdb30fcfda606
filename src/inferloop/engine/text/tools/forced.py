"""Grammars under which an answer has to be calls."""

from __future__ import annotations

from collections.abc import Sequence

from inferloop.core.request import Grammar
from inferloop.engine.text.tools.calls import Tool
from inferloop.engine.text.tools.dialect import Dialect

MAX_CALLS = 16
"""In one answer; a model that repeats itself comes to an end."""


def forced_calls(dialect: Dialect, tools: Sequence[Tool], *, parallel: bool, param: str) -> Grammar:
    """One call, or with `parallel` several, of `tools`, and no other text. Raises RequestError naming the tool."""
    return Grammar("lark", f"start: calls\n{_rules(dialect, tools, parallel)}", param)


def calls_or_json(dialect: Dialect, tools: Sequence[Tool], schema: str, *, parallel: bool, param: str) -> Grammar:
    """As `forced_calls`, or else a value of `schema`, which is the text of a JSON schema."""
    rules = _rules(dialect, tools, parallel)
    return Grammar("lark", f"start: calls | answer\nanswer: %json {schema}\n{rules}", param)


def _rules(dialect: Dialect, tools: Sequence[Tool], parallel: bool) -> str:
    return dialect.grammar(tools, MAX_CALLS if parallel else 1)

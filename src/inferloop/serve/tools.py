"""The fields of a request that offer functions, checked, and what follows from them for the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from inferloop.backends.protocols import GeneratorInfo
from inferloop.core.errors import RequestError
from inferloop.core.request import Grammar
from inferloop.engine.text.answer import AnswerPlan
from inferloop.engine.text.depth import MAX_DEPTH, is_too_deep
from inferloop.engine.text.tools.calls import Tool
from inferloop.engine.text.tools.dialects import DIALECTS
from inferloop.engine.text.tools.forced import calls_or_json, forced_calls, strict_calls

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

FunctionName = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]+$")]
Mode = Literal["none", "auto", "required", "named"]


class FunctionDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    """`parameters` is a JSON schema of an object; absent: the function takes no arguments. A forced call keeps to it in
    any case; one that the model chooses to make does where `strict` is true, in the hermes dialect."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    name: FunctionName


class ChosenTool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | ChosenTool


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether functions may or must be called. `name`: the one that must be, in the mode `named`."""

    mode: Mode = "auto"
    name: str = ""


def tools_of(definitions: Sequence[ToolDefinition]) -> tuple[Tool, ...]:
    """Raises RequestError naming the field."""
    tools = []
    for i, definition in enumerate(definitions):
        function, where = definition.function, f"tools[{i}].function"
        tools.append(
            checked_tool(function.name, function.description, function.parameters, function.strict, where=where)
        )
    check_tools(tools)
    return tuple(tools)


def choice_of(asked: ToolChoice | None) -> Choice:
    if isinstance(asked, ChosenTool):
        return Choice("named", asked.function.name)
    return Choice(asked or "auto")


def checked_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None, *, where: str
) -> Tool:
    """`where` is the path of the object that has these as fields. Raises RequestError naming the field."""
    if not _NAME.fullmatch(name):
        raise RequestError(f"{where}.name must be 1 to 64 letters, digits, _ or -", param=f"{where}.name")
    if parameters:
        _check_parameters(parameters, f"{where}.parameters")
    return Tool(name, description, parameters, bool(strict), param=f"{where}.parameters")


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises RequestError for too many, and for two of one name."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"a request takes at most {MAX_TOOLS} tools, got {len(tools)}", param="tools")
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            where = tool.param.removesuffix(".parameters")
            raise RequestError(f"{where}.name: there are two tools named {tool.name}", param=f"{where}.name")
        seen.add(tool.name)


def plan_answer(
    tools: Sequence[Tool],
    choice: Choice | None,
    parallel: bool | None,
    answer: Grammar | None,
    info: GeneratorInfo,
) -> tuple[AnswerPlan, Grammar | None]:
    """How to read the answer, and the grammar it has to keep to. `answer` is what the request's other fields want of
    the text. None for `choice` and `parallel`: not given. Raises RequestError naming the field."""
    style = info.answer_style
    thoughts = AnswerPlan(thinks=style.thinks, think_opened=style.think_opened)
    choice = choice or Choice("auto" if tools else "none")
    if not tools and choice.mode != "none":
        raise RequestError("tool_choice is only allowed together with tools", param="tool_choice")
    offered = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    if choice.mode == "named" and not offered:
        raise RequestError(f"tool_choice: there is no tool named {choice.name}", param="tool_choice")
    if choice.mode == "none":
        return thoughts, _thinking(answer, info)
    if style.tool_dialect is None:
        message = "tools cannot be called: how this model writes calls is not known (see --tool-call-parser)"
        raise RequestError(message, param="tools", code="unsupported_parameter")
    grammar = _grammar(offered, choice, parallel is not False, answer, info)
    plan = replace(
        thoughts,
        tool_dialect=style.tool_dialect,
        tool_names=tuple(tool.name for tool in offered),
        max_calls=1 if parallel is False or choice.mode == "named" else None,
        named=choice.mode == "named",
    )
    is_free = choice.mode == "auto" and answer is None  # its grammar, if any, is about calls within any text
    return plan, grammar if is_free else _thinking(grammar, info)


def _thinking(grammar: Grammar | None, info: GeneratorInfo) -> Grammar | None:
    """The same for what comes after the reasoning, of a model that thinks."""
    style = info.answer_style
    if grammar is None or not style.thinks:
        return grammar
    return replace(grammar, thinking="opened" if style.think_opened else "may")


def _grammar(
    offered: Sequence[Tool], choice: Choice, parallel: bool, answer: Grammar | None, info: GeneratorInfo
) -> Grammar | None:
    if answer is not None and answer.kind in ("regex", "lark"):
        raise RequestError(f"{answer.param} does not go together with tools that may be called", param=answer.param)
    dialect = DIALECTS[info.answer_style.tool_dialect or ""]
    if choice.mode == "auto":
        if not info.structured_output:
            return answer
        if answer is None:
            return strict_calls(dialect, offered, parallel=parallel)
        return calls_or_json(dialect, offered, answer, parallel=parallel)
    if info.fixed_answer:
        return None
    if not info.structured_output:
        message = "this server cannot force a call; tool_choice takes none and auto"
        raise RequestError(message, param="tool_choice", code="unsupported_parameter")
    if choice.mode == "named":
        return forced_calls(dialect, offered, parallel=False, param=offered[0].param)
    return forced_calls(dialect, offered, parallel=parallel, param="tools")


def _check_parameters(schema: Mapping[str, Any], where: str) -> None:
    if schema.get("type") != "object":
        raise RequestError(f'{where}.type must be "object": arguments are named', param=f"{where}.type")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise RequestError(f"{where}.properties must map names to schemas", param=f"{where}.properties")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{where}.required must be a list of names", param=f"{where}.required")
    check_depth(schema, where)


def check_depth(value: Any, where: str) -> None:
    """Raises RequestError for JSON that is nested deeper than anybody means."""
    if is_too_deep(value):
        raise RequestError(f"{where} is nested deeper than {MAX_DEPTH} levels", param=where)

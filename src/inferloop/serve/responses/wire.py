"""The body of a request to /v1/responses: decoded, checked completely, and turned into a Call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from inferloop.backends.protocols import GeneratorInfo, Prompt
from inferloop.core.errors import RequestError
from inferloop.core.request import Grammar
from inferloop.engine.text.tools.calls import Tool
from inferloop.serve.decode import decode_body
from inferloop.serve.no_op import NoOp, check_no_op
from inferloop.serve.responses.items import InputItem, messages_of
from inferloop.serve.sampled import (
    Obfuscation,
    Sampled,
    adapter_named,
    check_grammar,
    check_length,
    check_sampled,
    check_stream_options,
    sampling_of,
)
from inferloop.serve.structured import grammar_of, schema_text
from inferloop.serve.tools import Choice, FunctionName, check_tools, checked_tool, plan_answer
from inferloop.serve.wire import Call

LOGPROBS = "message.output_text.logprobs"
NAMES = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "include"}
"""Fields of chats, which errors of the engine name, as they are called here."""


class TextFormat(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """`strict` changes nothing: a schema is always kept to, or refused."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: NoOp = None


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """`parameters` is a JSON schema of an object; absent: the function takes no arguments. `strict` holds by grammar
    wherever a call is forced."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: FunctionName


ToolChoice = Literal["none", "auto", "required"] | ChosenFunction
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class ResponsesRequest(Sampled, kw_only=True):
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    text: TextConfig | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream_options: Obfuscation | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: NoOp = None
    store: NoOp = None
    background: NoOp = None
    previous_response_id: NoOp = None
    conversation: NoOp = None
    context_management: NoOp = None
    prompt: NoOp = None
    reasoning: NoOp = None
    service_tier: NoOp = None
    truncation: NoOp = None
    prompt_cache_retention: NoOp = None

    no_op: ClassVar[dict[str, tuple[Any, ...]]] = {
        "max_tool_calls": (),
        "store": (False,),
        "background": (False,),
        "previous_response_id": (),
        "conversation": (),
        "context_management": ([],),
        "prompt": (),
        "reasoning": ({},),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
        "prompt_cache_retention": ("in_memory",),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCall(Call):
    """A checked request whose answer repeats how it was asked."""

    request: ResponsesRequest


def parse_response(body: bytes, info: GeneratorInfo) -> ResponseCall:
    """Raises RequestError naming the field."""
    request = decode_body(body, ResponsesRequest)
    check_sampled(request, info)
    check_stream_options(request.stream_options, request)
    wants_logprobs = LOGPROBS in (request.include or ())
    if request.top_logprobs and not wants_logprobs:
        raise RequestError(f"top_logprobs needs {LOGPROBS} in include", param="top_logprobs")
    if not request.input:
        raise RequestError("input must not be empty", param="input")
    if not isinstance(request.input, str):
        check_length(request.input, info, "input")
    tools = _tools(request.tools or ())
    plan, grammar = plan_answer(tools, _choice(request), request.parallel_tool_calls, _grammar(request), info)
    check_grammar(grammar, request, info)
    messages = messages_of(request.instructions, request.input)
    return ResponseCall(
        prompts=(Prompt(messages=messages, tools=tuple(tool.definition for tool in tools)),),
        sampling=sampling_of(
            request, request.max_output_tokens, (request.top_logprobs or 0) if wants_logprobs else None, grammar
        ),
        stream=bool(request.stream),
        include_usage=True,
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        answer=plan,
        adapter=adapter_named(request.model, info),
        request=request,
    )


def _tools(definitions: Sequence[FunctionTool]) -> list[Tool]:
    tools = [
        checked_tool(one.name, one.description, one.parameters, one.strict, where=f"tools[{i}]")
        for i, one in enumerate(definitions)
    ]
    check_tools(tools)
    return tools


def _choice(request: ResponsesRequest) -> Choice | None:
    """Clients send the default along without tools."""
    asked = request.tool_choice
    if asked is None or (asked == "auto" and not request.tools):
        return None
    return Choice("named", asked.name) if isinstance(asked, ChosenFunction) else Choice(asked)


def _grammar(request: ResponsesRequest) -> Grammar | None:
    text = request.text or TextConfig()
    check_no_op(text.verbosity, ("medium",), "text.verbosity")
    grammar = grammar_of(request.structured_outputs, None)
    formatted = _of_format(text.format) if text.format is not None else None
    if grammar is not None and formatted is not None:
        raise RequestError("give text.format or structured_outputs, not both", param="structured_outputs")
    return grammar or formatted


def _of_format(asked: TextFormat) -> Grammar | None:
    for field in ("name", "schema", "description", "strict"):
        given, needed = getattr(asked, field) is not None, field in ("name", "schema")
        if asked.type == "json_schema" and needed and not given:
            param = f"text.format.{field}"
            raise RequestError(f"{param} is required", param=param, code="missing_required_parameter")
        if asked.type != "json_schema" and given:
            raise RequestError(f"text.format of type {asked.type} does not take {field}", param=f"text.format.{field}")
    if asked.type == "json_schema":
        param = "text.format.schema"
        return Grammar("json_schema", schema_text(asked.schema, param), param)
    return Grammar("json_object", param="text.format") if asked.type == "json_object" else None

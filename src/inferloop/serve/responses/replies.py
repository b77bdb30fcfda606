"""The object that /v1/responses answers with, and the fields of its events."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from inferloop.serve.replies import ChatLogprob, Timings
from inferloop.serve.responses.wire import FunctionTool, TextFormat, ToolChoice

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[str] = field(default_factory=list)
    """Always empty: there is nothing to cite."""
    logprobs: list[ChatLogprob] = field(default_factory=list)


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class Reasoning(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before its answer. It is not summarized."""

    id: str
    status: ItemStatus
    summary: list[str] = field(default_factory=list)
    content: list[ReasoningText]


class FunctionCall(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """`arguments` is the text of a JSON object. The output of the call is sent back under its `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | Reasoning | FunctionCall


class InputTokensDetails(Struct, kw_only=True):
    """`cache_write_tokens` is 0: writing is not told apart, because it costs the caller nothing."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, kw_only=True):
    """`reasoning_tokens` are those before the first of the answer, the tags around the reasoning included."""

    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    """`input_tokens` includes the cached ones."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Struct, kw_only=True):
    """Of an answer that failed after its stream had begun; before that it is an error object with its own status.
    `type` tells more than OpenAI's `code` has words for."""

    code: Literal["server_error", "invalid_prompt"]
    message: str
    param: str | None
    type: str


class ResponseText(Struct, kw_only=True):
    format: TextFormat
    verbosity: Literal["medium"] = "medium"


class Response(Struct, kw_only=True):
    """`store` is false whatever was asked: nothing is kept, so there is nothing to retrieve or to continue from."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: None = None
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: ResponseText
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    inferloop: Timings | UnsetType = UNSET

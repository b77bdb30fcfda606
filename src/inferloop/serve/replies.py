"""OpenAI response bodies, and the small endpoints' bodies. The same types make /openapi.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from inferloop.serve.messages import Message, TemplateVariables
from inferloop.serve.sampled import TokenId
from inferloop.serve.tools import ToolDefinition

EngineFinish = Literal["stop", "length"]
Finish = Literal["stop", "length", "tool_calls"]
StopReason = str | int | None
"""The stop string, or the id of the stop token, that ended it; None: neither. As with vLLM."""


class CachedTokens(Struct, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, kw_only=True):
    reasoning_tokens: int


class Usage(Struct, kw_only=True):
    """`prompt_tokens` includes the cached ones. Chats tell the details of what was generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Timings(Struct, kw_only=True):
    """Ours, sent only on the header `x-inferloop-timings: 1`. In a stream every chunk has `num_tokens`, the last one
    before [DONE] the rest. queue_ms counts from the request's arrival to its first schedule."""

    num_tokens: int
    queue_ms: float | UnsetType | None = UNSET
    prefill_ms: float | UnsetType | None = UNSET
    decode_ms: float | UnsetType | None = UNSET
    tokenize_ms: float | UnsetType | None = UNSET
    preempted_ms: float | UnsetType | None = UNSET
    num_preemptions: int | UnsetType = UNSET


class TopLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class AnswerFunction(Struct, kw_only=True):
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


class AnswerCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class AssistantMessage(Struct, kw_only=True):
    """`content` is null where there are only calls, or only reasoning."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class PromptLogprob(Struct, kw_only=True):
    """`rank` counts from 1, the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token, by token id: itself and the likeliest. Nothing comes before the first."""


class ChatChoice(Struct, kw_only=True):
    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: StopReason
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    inferloop: Timings | UnsetType = UNSET


class CompletionLogprobs(Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token begins in `text`, in characters; a part of a character is where the character is."""


class CompletionChoice(Struct, kw_only=True):
    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    stop_reason: StopReason
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    inferloop: Timings | UnsetType = UNSET


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "inferloop"
    max_model_len: int
    identity_digest: str
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET
    """Of an adapter: where it was loaded from, and the model that it belongs to."""


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class AdapterUnloaded(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    deleted: bool = True


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `prompt` and `messages`, which may have `tools` and `chat_template_kwargs`. `add_special_tokens`
    false leaves out the BOS before a prompt; `add_generation_prompt` false leaves out what the chat template prints
    before an answer."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolDefinition] | None = None
    chat_template_kwargs: TemplateVariables = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET
    """What each token stands for; a part of a character shows as U+FFFD."""


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(Struct, kw_only=True):
    prompt: str


class Live(Struct, kw_only=True):
    status: Literal["live"] = "live"


class Ready(Struct, kw_only=True):
    """`reason` says why not, when not."""

    ready: bool
    reason: str | None = None


class Progress(Struct, kw_only=True):
    """`in_flight` counts open requests of this server, running, waiting or still being answered."""

    alive: bool
    draining: bool
    step_counter: int
    running: int
    waiting: int
    in_flight: int


class Cancelled(Struct, kw_only=True):
    """`num_cancelled` HTTP requests had this id; all their choices end."""

    request_id: str
    num_cancelled: int


class ErrorBody(Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, kw_only=True):
    error: ErrorBody

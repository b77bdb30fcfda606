"""OpenAI request bodies: decoded, checked completely, and turned into a Call, before the engine hears of them.

Nothing is ignored: a field that is unknown, or known and not supported, is refused with its name. Fields that OpenAI
defines as having no influence on the answer (user, metadata, ...) are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from inferloop.backends.protocols import GeneratorInfo, Prompt
from inferloop.core.errors import RequestError
from inferloop.core.request import Sampling
from inferloop.serve.decode import decode_body
from inferloop.serve.messages import Message, plain_messages
from inferloop.serve.no_op import NoOp
from inferloop.serve.sampled import (
    Obfuscation,
    Sampled,
    TokenId,
    check_grammar,
    check_length,
    check_sampled,
    check_stream_options,
    check_token_ids,
    sampling_of,
)
from inferloop.serve.structured import ResponseFormat, grammar_of

MAX_N = 16
MAX_PROMPTS = 64
MAX_CHOICES = 128
"""Of all prompts of one request together."""
COMPLETION_MAX_TOKENS = 16
"""What OpenAI's completions endpoint generates at most when max_tokens is absent."""

Unused = Annotated[Any, Meta(description="Accepted; has no influence on the answer by OpenAI's definition.")]


class StreamOptions(Obfuscation, kw_only=True):
    include_usage: bool | None = None


class Common(Sampled, kw_only=True):
    """What chat and completions share. null means the default, as with OpenAI."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    user: Unused = None
    metadata: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None


class ChatRequest(Common):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: NoOp = None
    tool_choice: NoOp = None
    functions: NoOp = None
    function_call: NoOp = None
    parallel_tool_calls: NoOp = None
    response_format: ResponseFormat | None = None
    modalities: NoOp = None
    audio: NoOp = None
    prediction: NoOp = None
    reasoning_effort: NoOp = None
    verbosity: NoOp = None
    service_tier: NoOp = None
    store: NoOp = None
    web_search_options: NoOp = None

    no_op: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "web_search_options": (),
    }


class CompletionRequest(Common):
    prompt: str | list[TokenId | str | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: NoOp = None
    best_of: NoOp = None

    no_op: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",), "best_of": (1,)}


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request: what to generate, and how to answer."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    stream: bool
    include_usage: bool
    cache_salt: str = ""
    priority: int = 0
    num_per_prompt: int = 1
    echo: bool = False


def parse_chat(body: bytes, info: GeneratorInfo) -> Call:
    """Raises RequestError naming the field."""
    request = decode_body(body, ChatRequest)
    check_sampled(request, info)
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise RequestError("max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    check_length(request.messages, info, "messages")
    prompt = Prompt(messages=plain_messages(request.messages))
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens or request.max_tokens
    grammar = grammar_of(request.structured_outputs, request.response_format)
    check_grammar(grammar, request, info)
    return _call(request, (prompt,), sampling_of(request, max_tokens, num_logprobs, grammar))


def parse_completion(body: bytes, info: GeneratorInfo) -> Call:
    """Raises RequestError naming the field."""
    request = decode_body(body, CompletionRequest)
    check_sampled(request, info)
    prompts = _plain_prompts(request.prompt, info)
    if request.echo and request.logprobs is not None:
        message = "echo together with logprobs is not supported by this server"
        raise RequestError(message, param="echo", code="unsupported_parameter")
    grammar = grammar_of(request.structured_outputs, None)
    check_grammar(grammar, request, info)
    sampling = sampling_of(request, request.max_tokens, request.logprobs, grammar)
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=max(COMPLETION_MAX_TOKENS, sampling.min_tokens), cut_max_tokens=True)
    return replace(_call(request, prompts, sampling), echo=bool(request.echo))


def _call(request: Common, prompts: tuple[Prompt, ...], sampling: Sampling) -> Call:
    options = request.stream_options
    check_stream_options(options, request)
    include_usage = bool(options and options.include_usage)
    n = request.n or 1
    if n * len(prompts) > MAX_CHOICES:
        raise RequestError(f"{len(prompts)} prompts with n = {n} make more than {MAX_CHOICES} choices", param="n")
    return Call(
        prompts,
        sampling,
        bool(request.stream),
        include_usage,
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        num_per_prompt=n,
    )


def _plain_prompts(prompt: str | list[int | str | list[int]], info: GeneratorInfo) -> tuple[Prompt, ...]:
    """A text, token ids, texts, or lists of token ids; never mixed, because nobody means that."""
    if isinstance(prompt, str):
        return (_plain_prompt(prompt, info, "prompt"),)
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return (_plain_prompt(ids, info, "prompt"),)
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"a request takes at most {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt")
    if len({type(item) for item in prompt}) > 1:
        raise RequestError("prompt mixes texts, token ids and lists of them; give one kind", param="prompt")
    several = [item for item in prompt if not isinstance(item, int)]
    return tuple(_plain_prompt(item, info, f"prompt[{i}]") for i, item in enumerate(several))


def _plain_prompt(prompt: str | list[int], info: GeneratorInfo, field: str) -> Prompt:
    if len(prompt) == 0:
        raise RequestError(f"{field} must not be empty", param=field)
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    check_length(prompt, info, field)
    check_token_ids(prompt, info.vocab_size, field)
    return Prompt(token_ids=tuple(prompt))

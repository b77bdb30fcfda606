"""OpenAI request bodies: decoded, checked completely, and turned into a Call, before the engine hears of them.

Nothing is ignored: a field that is unknown, or known and not supported, is refused with its name. Fields that OpenAI
defines as having no influence on the answer (user, metadata, ...) are accepted.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from inferloop.backends.protocols import GeneratorInfo, Prompt
from inferloop.core.errors import ContextLengthError, RequestError
from inferloop.core.request import Grammar, Sampling
from inferloop.serve.decode import decode_body
from inferloop.serve.errors import ModelNotFoundError
from inferloop.serve.messages import Message, plain_messages
from inferloop.serve.no_op import NoOp, check_no_op
from inferloop.serve.structured import ResponseFormat, StructuredOutputs, grammar_of

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_N = 16
MAX_PROMPTS = 64
MAX_CHOICES = 128
"""Of all prompts of one request together."""
_MAX_ID_DIGITS = 10
COMPLETION_MAX_TOKENS = 16
"""What OpenAI's completions endpoint generates at most when max_tokens is absent."""

Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0)]
Priority = Annotated[int, Meta(ge=-1000, le=1000, description="Lower goes first.")]
Unused = Annotated[Any, Meta(description="Accepted; has no influence on the answer by OpenAI's definition.")]


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and completions share. null means the default, as with OpenAI."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, description="0 and -1 are off.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    cache_salt: (
        Annotated[
            str, Meta(min_length=1, max_length=256, description="Prompts share a prefix cache only under one salt.")
        ]
        | None
    ) = None
    priority: Priority | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Unused = None
    metadata: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None

    no_op: ClassVar[dict[str, tuple[Any, ...]]] = {}


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
    _check_common(request, info)
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise RequestError("max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    _check_length(request.messages, info, "messages")
    prompt = Prompt(messages=plain_messages(request.messages))
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens or request.max_tokens
    grammar = _grammar(request, request.response_format, info)
    return _call(request, (prompt,), replace(_sampling(request, max_tokens, num_logprobs), grammar=grammar))


def parse_completion(body: bytes, info: GeneratorInfo) -> Call:
    """Raises RequestError naming the field."""
    request = decode_body(body, CompletionRequest)
    _check_common(request, info)
    prompts = _plain_prompts(request.prompt, info)
    if request.echo and request.logprobs is not None:
        message = "echo together with logprobs is not supported by this server"
        raise RequestError(message, param="echo", code="unsupported_parameter")
    sampling = _sampling(request, request.max_tokens, request.logprobs)
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=max(COMPLETION_MAX_TOKENS, sampling.min_tokens), cut_max_tokens=True)
    call = _call(request, prompts, replace(sampling, grammar=_grammar(request, None, info)))
    return replace(call, echo=bool(request.echo))


def _call(request: Common, prompts: tuple[Prompt, ...], sampling: Sampling) -> Call:
    options = request.stream_options
    if options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise RequestError("min_tokens must not exceed max_tokens", param="min_tokens")
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


def _check_common(request: Common, info: GeneratorInfo) -> None:
    if request.model != info.model_id:
        raise ModelNotFoundError(request.model, info.model_id)
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise RequestError("obfuscation of streams is not supported", param="stream_options.include_obfuscation")
    for field, accepted in request.no_op.items():
        check_no_op(getattr(request, field), accepted, field)
    if request.top_k is not None and request.top_k > info.vocab_size:
        raise RequestError(f"top_k must not exceed the vocabulary size, {info.vocab_size}", param="top_k")
    check_token_ids(request.stop_token_ids or [], info.vocab_size, "stop_token_ids")
    _check_logit_bias(request.logit_bias or {}, info.vocab_size)


def _grammar(request: Common, response_format: ResponseFormat | None, info: GeneratorInfo) -> Grammar | None:
    grammar = grammar_of(request.structured_outputs, response_format)
    if grammar is None:
        return None
    if not info.structured_output:
        message = f"{grammar.param} is not supported by this server"
        raise RequestError(message, param=grammar.param, code="unsupported_parameter")
    # the answer ends where its grammar does, which neither may overrule
    for field in ("ignore_eos", "min_tokens"):
        if getattr(request, field):
            raise RequestError(f"{field} does not go together with {grammar.param}", param=field)
    return grammar


def _check_length(items: Sized, info: GeneratorInfo, field: str) -> None:
    """Every item takes a token at least; so that what can never fit is not looked at one by one."""
    if len(items) >= info.context_length:
        raise ContextLengthError(
            f"{field} has {len(items)} items, the context holds {info.context_length} tokens", param=field
        )


def check_token_ids(token_ids: list[int], vocab_size: int, field: str) -> None:
    """Raises RequestError for the first id outside the vocabulary."""
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{field}[{i}] is {token_id}, outside the vocabulary of {vocab_size}", param=field)


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
    _check_length(prompt, info, field)
    check_token_ids(prompt, info.vocab_size, field)
    return Prompt(token_ids=tuple(prompt))


def _sampling(request: Common, max_tokens: int | None, num_logprobs: int | None) -> Sampling:
    def default(value: Any, otherwise: Any) -> Any:
        return otherwise if value is None else value

    return Sampling(
        temperature=float(default(request.temperature, 1.0)),
        top_p=float(default(request.top_p, 1.0)),
        top_k=max(0, default(request.top_k, 0)),
        min_p=float(default(request.min_p, 0.0)),
        seed=None if request.seed is None else request.seed & (2**64 - 1),
        max_tokens=max_tokens,
        min_tokens=default(request.min_tokens, 0),
        stop=_stops(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        num_logprobs=num_logprobs,
        presence_penalty=float(default(request.presence_penalty, 0.0)),
        frequency_penalty=float(default(request.frequency_penalty, 0.0)),
        repetition_penalty=float(default(request.repetition_penalty, 1.0)),
        logit_bias=_logit_bias(request.logit_bias),
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings", param="stop")
    if any(not 0 < len(s) <= MAX_STOP_LENGTH for s in stops):
        raise RequestError(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters", param="stop")
    return stops


def _logit_bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(key), float(value)) for key, value in (bias or {}).items()))


def _check_logit_bias(bias: dict[str, float], vocab_size: int) -> None:
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
            raise RequestError(f"logit_bias maps token ids to biases; {key[:20]!r} is not an id", param="logit_bias")
        check_token_ids([int(key)], vocab_size, "logit_bias")

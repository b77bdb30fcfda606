"""The fields that say how tokens are chosen, the same on every endpoint: decoded, checked, and made into a Sampling."""

from __future__ import annotations

from collections.abc import Sized
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from inferloop.backends.protocols import GeneratorInfo, ServedAdapter
from inferloop.core.errors import ContextLengthError, RequestError
from inferloop.core.request import Grammar, Sampling
from inferloop.serve.errors import ModelNotFoundError
from inferloop.serve.no_op import check_no_op
from inferloop.serve.structured import StructuredOutputs

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 64
_MAX_ID_DIGITS = 10

Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0)]
Priority = Annotated[int, Meta(ge=-1000, le=1000, description="Lower goes first.")]
CacheSalt = Annotated[
    str, Meta(min_length=1, max_length=256, description="Prompts share a prefix cache only under one salt.")
]


class Obfuscation(Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a stream."""

    include_obfuscation: bool | None = None


class Sampled(Struct, forbid_unknown_fields=True, kw_only=True):
    """null means the default, as with OpenAI."""

    model: str
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, description="0 and -1 are off.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None

    no_op: ClassVar[dict[str, tuple[Any, ...]]] = {}


def check_sampled(request: Sampled, info: GeneratorInfo) -> None:
    """Everything but the grammar. Raises RequestError naming the field."""
    adapter_named(request.model, info)
    for field, accepted in request.no_op.items():
        check_no_op(getattr(request, field), accepted, field)
    if request.top_k is not None and request.top_k > info.vocab_size:
        raise RequestError(f"top_k must not exceed the vocabulary size, {info.vocab_size}", param="top_k")
    check_token_ids(request.stop_token_ids or [], info.vocab_size, "stop_token_ids")
    _check_logit_bias(request.logit_bias or {}, info.vocab_size)


def adapter_named(model: str, info: GeneratorInfo) -> ServedAdapter | None:
    """What a request's model names: an adapter, or None for the model alone. Raises ModelNotFoundError."""
    if model == info.model_id:
        return None
    if model not in info.adapters:
        raise ModelNotFoundError(model, info.model_id, info.adapters)
    return info.adapters[model]


def check_grammar(grammar: Grammar | None, request: Sampled, info: GeneratorInfo) -> None:
    """That the server has grammars, and nothing beside it overrules this one. Raises RequestError."""
    if grammar is None:
        return
    if not info.structured_output:
        message = f"{grammar.param} is not supported by this server"
        raise RequestError(message, param=grammar.param, code="unsupported_parameter")
    # the answer ends where its grammar does, which neither may overrule
    for field in ("ignore_eos", "min_tokens"):
        if getattr(request, field):
            raise RequestError(f"{field} does not go together with {grammar.param}", param=field)


def check_stream_options(options: Obfuscation | None, request: Sampled) -> None:
    """Raises RequestError for options of a stream that was not asked for, and for padding of its chunks."""
    if options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if options is not None and options.include_obfuscation:
        raise RequestError("obfuscation of streams is not supported", param="stream_options.include_obfuscation")


def check_length(items: Sized, info: GeneratorInfo, field: str, *, num_output: int = 1) -> None:
    """Every item takes a token at least; so that what can never fit is not looked at one by one."""
    if len(items) + num_output > info.context_length:
        raise ContextLengthError(
            f"{field} has {len(items)} items, the context holds {info.context_length} tokens", param=field
        )


def check_token_ids(token_ids: list[int], vocab_size: int, field: str) -> None:
    """Raises RequestError for the first id outside the vocabulary."""
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{field}[{i}] is {token_id}, outside the vocabulary of {vocab_size}", param=field)


def sampling_of(
    request: Sampled, max_tokens: int | None, num_logprobs: int | None, grammar: Grammar | None = None
) -> Sampling:
    """Of a request that was checked. Raises RequestError where fields contradict each other."""

    def default(value: Any, otherwise: Any) -> Any:
        return otherwise if value is None else value

    if max_tokens is not None and default(request.min_tokens, 0) > max_tokens:
        raise RequestError("min_tokens must not exceed max_tokens", param="min_tokens")
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
        grammar=grammar,
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

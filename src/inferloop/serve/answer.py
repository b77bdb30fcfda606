"""From the bytes of a request to the bytes of its answer, without HTTP: what requests and rows of batch jobs share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from inferloop.backends.protocols import Delta, GenerateRequest, GeneratorInfo
from inferloop.core.errors import EngineError, RequestError
from inferloop.core.ids import new_id
from inferloop.core.request import FinishReason
from inferloop.core.units import NS_PER_S
from inferloop.serve import sse
from inferloop.serve.chat import ChatEncoder
from inferloop.serve.choices import generate_all, spread
from inferloop.serve.completions import CompletionEncoder
from inferloop.serve.decode import beside_loop
from inferloop.serve.finish import Attempt
from inferloop.serve.replies import EngineFinish
from inferloop.serve.responses.encode import ResponseEncoder
from inferloop.serve.responses.wire import NAMES, parse_response
from inferloop.serve.wire import Call, parse_chat, parse_completion


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one endpoint reads requests and writes answers."""

    parse: Callable[[bytes, GeneratorInfo], Call]
    encoder: Callable[[sse.AnswerHead], sse.Encoder]
    id_prefix: str
    names: Mapping[str, str] = field(default_factory=dict)
    """What this endpoint calls a field that errors of the engine name otherwise."""

    def in_its_words(self, error: RequestError) -> None:
        """Let `error`, which is changed, name the field as this endpoint's caller knows it."""
        whole = (error.param or "").split("[", 1)[0]
        error.param = self.names.get(whole, error.param)


CHAT = Dialect(parse_chat, ChatEncoder, "chatcmpl")
COMPLETIONS = Dialect(parse_completion, CompletionEncoder, "cmpl")
RESPONSES = Dialect(parse_response, ResponseEncoder, "resp_", NAMES)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What to ask the generator, one request per choice, and what writes the answer."""

    requests: list[GenerateRequest]
    encoder: sse.Encoder
    stream: bool


async def prepare(
    attempt: Attempt, dialect: Dialect, body: bytes, *, with_timings: bool = False, priority: int | None = None
) -> Prepared:
    """Check `body` completely; sets `attempt.call`. `priority` None is the one that the body asks for. Raises
    RequestError naming the field."""
    replica = attempt.replica
    attempt.call = call = await beside_loop(dialect.parse, body, replica.info)
    codec = replica.codec
    if call.sampling.num_logprobs is not None and codec is None:
        raise RequestError("log-probabilities are not supported by this backend", param="logprobs")
    if call.return_token_ids and codec is None:
        raise RequestError("this backend does not tell token ids", param="return_token_ids")
    attempt.go_through(call.adapter)
    echoes = await _echoes(attempt, call)
    head = sse.AnswerHead(
        id=new_id(dialect.id_prefix),
        created=attempt.t_wall_ns // NS_PER_S,
        model=attempt.model_id,
        call=call,
        with_timings=with_timings,
        token_bytes=codec.token_bytes if codec is not None else _no_bytes,
        echoes=echoes,
        usage_so_far=(lambda: attempt.usage) if call.continuous_usage else None,
    )
    request = GenerateRequest(
        attempt.request_id,
        attempt.trace,
        call.prompts[0],
        call.sampling,
        t_engine_in_ns=attempt.t_in_ns,
        priority=call.priority if priority is None else priority,
        cache_salt=call.cache_salt,
        n=call.num_per_prompt,
        num_choices=call.num_per_prompt * len(call.prompts),
        adapter=call.adapter,
    )
    return Prepared(spread(call, request), dialect.encoder(head), call.stream)


async def answer_whole(attempt: Attempt, prepared: Prepared) -> bytes:
    """Generate all choices and give the whole answer's body; `attempt` is not ended yet."""
    encoder = prepared.encoder
    finishes: dict[int, EngineFinish] = {}

    def take(index: int, delta: Delta) -> None:
        attempt.on_delta(delta, index)
        encoder.collect(index, delta)
        if delta.finish_reason is not None:
            finishes[index] = public_finish(delta.finish_reason)

    await generate_all(attempt.replica.generator, prepared.requests, take)
    usage = attempt.usage
    in_order = [public_finish(finishes.get(index)) for index in range(len(prepared.requests))]
    timings = attempt.timings(usage.completion_tokens)
    if attempt.call is not None and attempt.call.sampling.num_prompt_logprobs is not None:  # there may be very many
        return await asyncio.to_thread(encoder.body, in_order, usage, timings)
    return encoder.body(in_order, usage, timings)


def public_finish(reason: FinishReason | None) -> EngineFinish:
    """Raises EngineError for an end that is none of the API's."""
    if reason == "stop" or reason == "length":
        return reason
    raise EngineError("the engine ended this request before it was complete")


async def _echoes(attempt: Attempt, call: Call) -> tuple[str, ...]:
    """What each choice's text begins with."""
    texts = [""] * len(call.prompts)
    if call.echo:
        codec = attempt.replica.codec
        for i, prompt in enumerate(call.prompts):
            if prompt.token_ids is None:
                texts[i] = prompt.text or ""
            elif codec is None:
                raise RequestError("echo of token ids is not supported by this backend", param="echo")
            else:
                texts[i] = await asyncio.to_thread(codec.decode, prompt.token_ids)
    return tuple(text for text in texts for _ in range(call.num_per_prompt))


def _no_bytes(_: int) -> bytes:
    return b""

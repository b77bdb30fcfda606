"""/v1/embeddings: texts to vectors of length 1, many in one request."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import Headers
from starlette.types import Send

from inferloop.backends.protocols import (
    Delta,
    Embedder,
    Embedding,
    EmbedRequest,
    GeneratorInfo,
    Prompt,
    ServedAdapter,
    TextCodec,
)
from inferloop.core.errors import ContextLengthError, OverloadedError, RequestError
from inferloop.serve.asgi import send_json
from inferloop.serve.decode import beside_loop, decode_body
from inferloop.serve.endpoint import Answering, Endpoint
from inferloop.serve.finish import Attempt
from inferloop.serve.sampled import CacheSalt, Priority, TokenId, adapter_named
from inferloop.serve.wire import Unused, plain_prompts

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 300_000
"""Of all inputs of one request together; both limits are OpenAI's."""
_AT_ONCE = 32
"""How many inputs of one request are with the engine at a time, so that a long list does not fill the queue."""


class EmbeddingsRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """null means the default, as with OpenAI."""

    model: str
    input: str | list[TokenId | str | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, description="Only what the model has.")] | None = None
    user: Unused = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None


class EmbeddingEntry(Struct, kw_only=True):
    """base64 is of little-endian fp32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingsUsage


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """A checked request. `fields` name each prompt in errors; none has more than `max_tokens`."""

    prompts: tuple[Prompt, ...]
    fields: tuple[str, ...]
    max_tokens: int
    in_base64: bool
    priority: int
    cache_salt: str
    adapter: ServedAdapter | None


class EmbeddingsEndpoint(Endpoint):
    def answering(self, attempt: Attempt, headers: Headers, send: Send) -> Answering:
        return _Answer(attempt, send)


class _Answer(Answering):
    async def run(self, body: bytes) -> None:
        answer = await answer_embeddings(self.attempt, body)
        self.started = True
        self.attempt.finish()
        await send_json(self.send, 200, answer)


def parse_embeddings(body: bytes, info: GeneratorInfo) -> EmbedCall:
    """Raises RequestError naming the field."""
    request = decode_body(body, EmbeddingsRequest)
    adapter = adapter_named(request.model, info)
    if info.embedding is None:
        raise RequestError("embeddings are not supported by this server", code="unsupported_endpoint")
    if request.dimensions not in (None, info.embedding.size):
        message = f"vectors of this model have {info.embedding.size} dimensions, and cannot be shortened"
        raise RequestError(message, param="dimensions")
    prompts = plain_prompts(request.input, info, "input", num_output=0, most=MAX_INPUTS)
    is_list = isinstance(request.input, list) and not isinstance(request.input[0], int)
    return EmbedCall(
        prompts=prompts,
        fields=tuple(f"input[{i}]" for i in range(len(prompts))) if is_list else ("input",),
        max_tokens=info.embedding.max_tokens,
        in_base64=request.encoding_format == "base64",
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        adapter=adapter,
    )


async def answer_embeddings(attempt: Attempt, body: bytes, *, priority: int | None = None) -> bytes:
    """The whole answer's body; `attempt` counts, and is not ended yet. `priority` None: the one that the body asks for.

    Everything is checked before anything is computed. Raises RequestError naming the field. When one input fails, or
    the caller is cancelled, all are aborted.
    """
    replica = attempt.replica
    call = await beside_loop(parse_embeddings, body, replica.info)
    attempt.go_through(call.adapter)
    codec, embedder = replica.codec, replica.generator
    assert codec is not None and isinstance(embedder, Embedder), "who embeds has a tokenizer"
    prompts = await asyncio.to_thread(_token_ids, codec, call)
    t_tokenized_ns = replica.clock.now_ns()
    requests = [
        EmbedRequest(
            attempt.request_id,
            attempt.trace,
            ids,
            t_engine_in_ns=attempt.t_in_ns,
            t_tokenized_ns=t_tokenized_ns,
            priority=call.priority if priority is None else priority,
            cache_salt=call.cache_salt,
            adapter=call.adapter,
        )
        for ids in prompts
    ]
    found = await _embed_all(attempt, embedder, requests)
    num_tokens = sum(map(len, prompts))
    usage = EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return await asyncio.to_thread(_encoded, found, attempt.model_id, usage, in_base64=call.in_base64)


def _token_ids(codec: TextCodec, call: EmbedCall) -> list[tuple[int, ...]]:
    found, num_tokens = [], 0
    for prompt, field in zip(call.prompts, call.fields, strict=True):
        try:
            ids = codec.render(prompt, max_tokens=call.max_tokens)
        except RequestError as error:
            raise RequestError(f"{field}: {error.message}", param=field, code=error.code) from None
        if len(ids) > call.max_tokens:
            message = f"{field} has {len(ids)} tokens, at most {call.max_tokens} fit"
            raise ContextLengthError(message, param=field)
        num_tokens += len(ids)
        if num_tokens > MAX_INPUT_TOKENS:
            raise RequestError(f"a request takes at most {MAX_INPUT_TOKENS} tokens in all", param="input")
        found.append(ids)
    return found


async def _embed_all(attempt: Attempt, embedder: Embedder, requests: Sequence[EmbedRequest]) -> list[Embedding]:
    """In the order of `requests`. The queue being full is no failure while some of them are in it: the rest wait."""
    found: dict[int, Embedding] = {}
    left, running, limit = deque(range(len(requests))), dict[asyncio.Task[Embedding], int](), _AT_ONCE
    try:
        while left or running:
            while left and len(running) < limit:
                index = left.popleft()
                running[asyncio.create_task(embedder.embed(requests[index]))] = index
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended = [(running.pop(task), task) for task in done]
            errors = [task.exception() for _, task in ended]  # each is looked at, also when an earlier one is raised
            for (index, task), error in zip(ended, errors, strict=True):
                if isinstance(error, OverloadedError):
                    left.appendleft(index)
                    continue
                embedding = found[index] = task.result()
                attempt.on_delta(_delta(requests[index], embedding), index)
            num_refused = sum(index not in found for index, _ in ended)
            if num_refused == len(ended) and not running:
                ended[0][1].result()  # the queue is full of others: raises
            limit = max(1, len(running)) if num_refused else min(_AT_ONCE, limit + 1)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return [found[index] for index in range(len(requests))]


def _delta(request: EmbedRequest, done: Embedding) -> Delta:
    """What an attempt counts."""
    return Delta("", (), done.t_ns, prompt_token_ids=request.token_ids, finish_reason="stop", times=done.times)


def _encoded(found: Sequence[Embedding], model: str, usage: EmbeddingsUsage, *, in_base64: bool) -> bytes:
    entries = []
    for index, done in enumerate(found):
        data = base64.b64encode(done.vector.astype("<f4").tobytes()).decode() if in_base64 else done.vector.tolist()
        entries.append(EmbeddingEntry(index=index, embedding=data))
    return msgspec.json.encode(Embeddings(data=entries, model=model, usage=usage))

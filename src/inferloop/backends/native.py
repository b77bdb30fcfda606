"""Our own engine as a Generator: texts to ids on the way in, ids to text on the way out, one thread hop per step."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from inferloop.backends.assemble import IncrementalDecoder
from inferloop.backends.native_answer import Answer, Inbox
from inferloop.backends.protocols import (
    Delta,
    Embedding,
    EmbeddingInfo,
    EmbedRequest,
    GenerateRequest,
    GeneratorInfo,
    Preview,
    Prompt,
    StageTimes,
)
from inferloop.core.clock import Clock, RealClock
from inferloop.core.errors import EngineError, OverloadedError, RequestError
from inferloop.core.request import Grammar, Sampling, TokenRequest
from inferloop.engine.blockstore.store import BlockStore
from inferloop.engine.compute.runner import Runner
from inferloop.engine.config import EngineConfig
from inferloop.engine.loop import Engine
from inferloop.engine.roster import TokenUpdate
from inferloop.engine.schedule.mask import Mask
from inferloop.engine.schedule.step import Float32, Float64
from inferloop.engine.stats import EngineStats
from inferloop.engine.text.answer import PLAIN_STYLE, AnswerStyle
from inferloop.models.identity import ServingIdentity

_THREAD_ABOVE_CHARS = 4096
"""Shorter texts are tokenized in well under a millisecond, less than a hop to a thread costs under load."""
_TEMPLATE_CHARS = 32
"""About what a chat template adds to a message, even to an empty one."""


class NativeCodec(Protocol):
    """What engine.text.codec.Codec does."""

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]: ...

    def encode_text(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> tuple[int, ...]: ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> IncrementalDecoder: ...


@runtime_checkable
class GrammarCodec(Protocol):
    """What a codec that can compile grammars offers beside NativeCodec."""

    def compile_grammar(self, grammar: Grammar) -> Mask: ...


class NativeGenerator:
    """Implements Generator, TextCodec and Embedder. `start` before the first request; `stop` ends every request."""

    def __init__(
        self,
        codec: NativeCodec,
        runner: Runner,
        config: EngineConfig,
        identity: ServingIdentity,
        *,
        clock: Clock | None = None,
        answer_style: AnswerStyle = PLAIN_STYLE,
        store: BlockStore | None = None,
    ) -> None:
        """`store`: the prefix cache's second tier; the generator's from here on."""
        self._codec, self._clock = codec, clock or RealClock()
        self._store = store
        self._engine = Engine(runner, config, self._clock, self._on_updates, store)
        self._numbers = itertools.count()
        self._inboxes: dict[str, Inbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        size = runner.info.hidden_size
        self._info = GeneratorInfo(
            model_id=identity.model_id,
            context_length=self._engine.max_total_tokens,
            identity=identity,
            vocab_size=runner.info.vocab_size,
            structured_output=isinstance(codec, GrammarCodec),
            answer_style=answer_style,
            scoring=True,
            embedding=EmbeddingInfo(size, self._engine.max_prompt_tokens) if size else None,
        )

    def start(self) -> None:
        self._engine.start()

    def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Blocks until the engine's thread has ended, and what it computed last has been stored. Idempotent."""
        self._engine.stop(drain_timeout_s)
        if self._store is not None:
            self._store.close()

    def describe(self) -> tuple[GeneratorInfo, EngineStats]:
        return self._info, self._engine.stats()

    def render(
        self,
        prompt: Prompt,
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        if prompt.messages is not None:
            return self._codec.encode_chat(
                prompt.messages,
                add_generation_prompt=add_generation_prompt,
                tools=prompt.tools,
                variables=prompt.variables,
                max_tokens=max_tokens,
            )
        if prompt.text is not None:
            return self._codec.encode_text(prompt.text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        return prompt.token_ids or ()

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return self._codec.decode(token_ids, skip_special=False)

    def token_bytes(self, token_id: int) -> bytes:
        return self._codec.token_bytes(token_id)

    async def preview(self, request: GenerateRequest) -> Preview:
        token_ids = await self._encode(request.prompt)
        text = await asyncio.to_thread(self._text, request.prompt)
        await self._compile(request.sampling.grammar)
        self._engine.check_together(len(token_ids), request.n, request.num_choices)
        with _naming(request.prompt):
            max_tokens = self._engine.max_tokens_of(_token_request(request, request.request_id, token_ids))
        return Preview(text, token_ids, max_tokens)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self._loop = asyncio.get_running_loop()
        self._engine.check_open(request.priority)
        prompt_ids = await self._encode(request.prompt)
        self._engine.check_together(len(prompt_ids), request.n, request.num_choices)
        mask = await self._compile(request.sampling.grammar)
        answer = Answer(self._codec.detokenizer(prompt_ids), request, prompt_ids, self._clock)
        with self._asking(request.request_id) as (engine_id, inbox):
            self._submit(request, engine_id, prompt_ids, mask)
            while True:
                while (update := inbox.take()) is None:
                    await inbox.arrival()
                if update.finish_reason == "error" and mask is not None and mask.failed:
                    raise _too_complex(request.sampling.grammar)
                if update.finish_reason == "shed":
                    raise _too_late(self._engine.retry_after_s())
                delta = answer.delta(update)
                if delta.finish_reason is None:
                    yield delta
                    continue
                if not inbox.ended:  # a stop string, which the engine cannot see
                    self._engine.abort(engine_id)
                    inbox.ended = True
                yield delta
                return

    async def embed(self, request: EmbedRequest) -> Embedding:
        self._loop = asyncio.get_running_loop()
        with self._asking(request.request_id) as (engine_id, inbox):
            self._engine.submit(
                TokenRequest(
                    request_id=engine_id,
                    prompt_token_ids=request.token_ids,
                    sampling=Sampling(max_tokens=0),
                    trace=request.trace,
                    t_engine_in_ns=request.t_engine_in_ns,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    pool=True,
                )
            )
            update = await inbox.get()
        if update.pooled is None:
            raise EngineError("the engine stopped before this request was complete")
        times = StageTimes(
            t_engine_in_ns=request.t_engine_in_ns,
            t_tokenized_ns=request.t_tokenized_ns,
            t_scheduled_ns=update.t_scheduled_ns,
            preempted_ns=update.preempted_ns,
            num_preemptions=update.num_preemptions,
        )
        return Embedding(_unit(update.pooled), update.t_ns, times)

    @contextlib.contextmanager
    def _asking(self, request_id: str) -> Iterator[tuple[str, Inbox]]:
        """The engine's id of one request and its updates; it does not outlive the block."""
        # A caller's request id may repeat; the engine's must not.
        engine_id = f"{request_id}/{next(self._numbers)}"
        inbox = self._inboxes[engine_id] = Inbox()
        try:
            yield engine_id, inbox
        finally:
            del self._inboxes[engine_id]
            if not inbox.ended:
                self._engine.abort(engine_id)

    async def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if _may_take_long(prompt):
            return await asyncio.to_thread(self.render, prompt, max_tokens=self._info.context_length)
        return self.render(prompt, max_tokens=self._info.context_length)

    async def _compile(self, grammar: Grammar | None) -> Mask | None:
        if grammar is None:
            return None
        if not isinstance(self._codec, GrammarCodec):
            raise RequestError("structured output is not supported by this model's codec", param=grammar.param)
        return await asyncio.to_thread(self._codec.compile_grammar, grammar)

    def _text(self, prompt: Prompt) -> str:
        if prompt.messages is not None:
            return self._codec.chat_text(prompt.messages, tools=prompt.tools, variables=prompt.variables)
        return prompt.text if prompt.text is not None else self.decode(prompt.token_ids or ())

    def _submit(self, request: GenerateRequest, engine_id: str, prompt_ids: tuple[int, ...], mask: Mask | None) -> None:
        with _naming(request.prompt):
            self._engine.submit(_token_request(request, engine_id, prompt_ids), mask)

    def _on_updates(self, updates: Sequence[TokenUpdate]) -> None:
        """On the engine's thread, once per step."""
        loop = self._loop
        assert loop is not None, "tokens without a request"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: Sequence[TokenUpdate]) -> None:
        for update in updates:
            inbox = self._inboxes.get(update.request_id)
            if inbox is not None:
                inbox.put(update)


def _may_take_long(prompt: Prompt) -> bool:
    """To render and tokenize. How large tools, calls and variables are is not worth finding out."""
    if prompt.messages is None:
        return len(prompt.text or "") > _THREAD_ABOVE_CHARS
    if prompt.tools or prompt.variables or any("tool_calls" in message for message in prompt.messages):
        return True
    texts = [text for m in prompt.messages for text in (m["content"], m.get("reasoning_content", ""))]
    return sum(map(len, texts)) + _TEMPLATE_CHARS * len(prompt.messages) > _THREAD_ABOVE_CHARS


def _unit(summed: Float64) -> Float32:
    """Of length 1, so that a sum is as good as the mean."""
    length = float(np.linalg.norm(summed))
    if not (math.isfinite(length) and length > 0):
        raise EngineError("the model's hidden states have no direction")
    return (summed / length).astype(np.float32)


def _token_request(request: GenerateRequest, engine_id: str, prompt_ids: tuple[int, ...]) -> TokenRequest:
    return TokenRequest(
        request_id=engine_id,
        prompt_token_ids=prompt_ids,
        sampling=request.sampling,
        trace=request.trace,
        t_engine_in_ns=request.t_engine_in_ns,
        priority=request.priority,
        cache_salt=request.cache_salt,
        sheddable=request.sheddable,
    )


@contextlib.contextmanager
def _naming(prompt: Prompt) -> Iterator[None]:
    """Errors about the prompt name the field that this caller sent."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt" and prompt.messages is not None:
            error.param = "messages"
        raise


def _too_late(retry_after_s: float) -> OverloadedError:
    message = "the queue is too long for a first token in time"
    return OverloadedError(message, retry_after_s=retry_after_s, reason="late")


def _too_complex(grammar: Grammar | None) -> RequestError:
    param = None if grammar is None else grammar.param
    return RequestError(f"{param} became too complex to follow in the course of the answer", param=param)

"""Our own engine as a Generator: texts to ids on the way in, ids to text on the way out, one thread hop per step."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from inferloop.backends.assemble import IncrementalDecoder
from inferloop.backends.native_adapters import AdapterShelf
from inferloop.backends.native_answer import Answer, DeltaReceiver, OnlyUpdate, Receiver, Together
from inferloop.backends.protocols import (
    Delta,
    Embedding,
    EmbeddingInfo,
    EmbedRequest,
    GenerateRequest,
    GeneratorInfo,
    Preview,
    Prompt,
    ServedAdapter,
    StageTimes,
    Take,
)
from inferloop.core.clock import Clock, RealClock
from inferloop.core.errors import EngineError, OverloadedError, RequestError
from inferloop.core.request import AdapterUse, Grammar, Sampling, TokenRequest
from inferloop.engine.blockstore.store import BlockStore
from inferloop.engine.compute.runner import Runner
from inferloop.engine.config import EngineConfig
from inferloop.engine.loop import Engine
from inferloop.engine.roster import TokenUpdate
from inferloop.engine.schedule.mask import Mask
from inferloop.engine.schedule.step import Float32, Float64
from inferloop.engine.stats import EngineStats
from inferloop.engine.text.answer import PLAIN_STYLE, AnswerStyle
from inferloop.engine.text.rendering import PromptCodec, Rendering
from inferloop.models.identity import ServingIdentity

_THREAD_ABOVE_CHARS = 4096
"""Shorter texts are tokenized in well under a millisecond, less than a hop to a thread costs under load."""
_TEMPLATE_CHARS = 32
"""About what a chat template adds to a message, even to an empty one."""


class NativeCodec(PromptCodec, Protocol):
    """What engine.text.codec.Codec does."""

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str: ...

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> IncrementalDecoder: ...


@runtime_checkable
class GrammarCodec(Protocol):
    """What a codec that can compile grammars offers beside NativeCodec."""

    def compile_grammar(self, grammar: Grammar) -> Mask: ...


class NativeGenerator(Rendering):
    """Implements Generator, Pusher, TextCodec, Embedder and AdapterHost. `start` before the first request; `stop` ends
    them all."""

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
        adapters: AdapterShelf | None = None,
    ) -> None:
        """`store`: the prefix cache's second tier, `adapters`: those of the runner; the generator's from here on."""
        self._codec: NativeCodec = codec
        self._clock = clock or RealClock()
        self._store, self._adapters = store, adapters
        self._engine = Engine(runner, config, self._clock, self._on_updates, store)
        self._numbers = itertools.count()
        self._receivers: dict[str, Receiver] = {}
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
            adapters={} if adapters is None else adapters.served,
            takes_adapters=adapters is not None,
        )

    def start(self) -> None:
        self._engine.start()

    def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Blocks until the engine's thread has ended, and what it computed last has been stored. Idempotent."""
        self._engine.stop(drain_timeout_s)
        if self._store is not None:
            self._store.close()

    def fail(self, error: Exception) -> None:
        """Something that the engine needs is gone: everything ends with an error, and nothing more is taken. Any
        thread."""
        self._engine.fail(error)

    def describe(self) -> tuple[GeneratorInfo, EngineStats]:
        return self._info, self._engine.stats()

    async def load_adapter(self, name: str, path: Path, *, replaces: bool = False) -> ServedAdapter:
        shelf = self._shelf()
        served = await shelf.load(name, path, self._engine.between_steps, replaces=replaces)
        self._info = replace(self._info, adapters=shelf.served)
        return served

    async def unload_adapter(self, name: str) -> None:
        shelf = self._shelf()
        shelf.unload(name, self._engine.between_steps)
        self._info = replace(self._info, adapters=shelf.served)

    async def preview(self, request: GenerateRequest) -> Preview:
        token_ids = await self._encode(request.prompt)
        text = await asyncio.to_thread(self._text, request.prompt)
        await self._compile(request.sampling.grammar)
        self._engine.check_together(len(token_ids), request.n, request.num_choices)
        with _naming(request.prompt):
            max_tokens = self._engine.max_tokens_of(_token_request(request, request.request_id, token_ids))
        return Preview(text, token_ids, max_tokens)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        coming: asyncio.Queue[Delta | None] = asyncio.Queue()
        task = asyncio.create_task(self.push([request], lambda _, delta: coming.put_nowait(delta)))
        task.add_done_callback(lambda _: coming.put_nowait(None))
        try:
            while (delta := await coming.get()) is not None:
                yield delta
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def push(self, requests: Sequence[GenerateRequest], take: Take) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine.check_open(requests[0].priority)
        answers, masks, prompt_ids = list[Answer](), list[Mask | None](), tuple[int, ...]()
        for i, request in enumerate(requests):
            if i == 0 or request.prompt is not requests[i - 1].prompt:  # choices of one prompt come together
                prompt_ids = await self._encode(request.prompt)
                self._engine.check_together(len(prompt_ids), request.n, request.num_choices)
            masks.append(await self._compile(request.sampling.grammar))
            answers.append(Answer(self._codec.detokenizer(prompt_ids), request, prompt_ids, self._clock))
        together = Together(len(requests))
        engine_ids = [self._engine_id(request.request_id) for request in requests]
        receivers = [
            DeltaReceiver(
                i,
                answer,
                take,
                together,
                problem=functools.partial(self._problem, request, mask),
                on_stop=functools.partial(self._engine.abort, engine_id),
            )
            for i, (request, answer, mask, engine_id) in enumerate(
                zip(requests, answers, masks, engine_ids, strict=True)
            )
        ]
        with (
            self._using(requests[0].adapter) as adapter,
            self._asking(engine_ids, receivers),
            _naming(requests[0].prompt),
        ):
            self._engine.submit_all(
                [
                    (_token_request(request, engine_id, answer.prompt_ids, adapter), mask)
                    for request, engine_id, answer, mask in zip(requests, engine_ids, answers, masks, strict=True)
                ]
            )
            await together.done

    async def embed(self, request: EmbedRequest) -> Embedding:
        self._loop = asyncio.get_running_loop()
        engine_id, receiver = self._engine_id(request.request_id), OnlyUpdate()
        with self._using(request.adapter) as adapter, self._asking([engine_id], [receiver]):
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
                    adapter=adapter,
                )
            )
            update = await receiver.update
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

    def _shelf(self) -> AdapterShelf:
        if self._adapters is None:
            raise RequestError("this server takes no adapters", code="adapters_not_enabled")
        return self._adapters

    def _using(self, adapter: ServedAdapter | None) -> contextlib.AbstractContextManager[AdapterUse | None]:
        """All requests in the block go through it."""
        if adapter is None:
            return contextlib.nullcontext()
        return self._shelf().using(adapter, self._engine.between_steps)

    def _engine_id(self, request_id: str) -> str:
        """A caller's request id may repeat; the engine's must not."""
        return f"{request_id}/{next(self._numbers)}"

    @contextlib.contextmanager
    def _asking(self, engine_ids: Sequence[str], receivers: Sequence[Receiver]) -> Iterator[None]:
        """Who gets the updates of these requests, which do not outlive the block."""
        self._receivers.update(zip(engine_ids, receivers, strict=True))
        try:
            yield
        finally:
            for engine_id, receiver in zip(engine_ids, receivers, strict=True):
                del self._receivers[engine_id]
                if not receiver.ended:
                    self._engine.abort(engine_id)

    def _problem(self, request: GenerateRequest, mask: Mask | None, update: TokenUpdate) -> Exception | None:
        """What is wrong with a last update that is no answer's end."""
        if update.finish_reason == "error" and mask is not None and mask.failed:
            return _too_complex(request.sampling.grammar)
        return _too_late(self._engine.retry_after_s()) if update.finish_reason == "shed" else None

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

    def _on_updates(self, updates: Sequence[TokenUpdate]) -> None:
        """On the engine's thread, once per step."""
        loop = self._loop
        assert loop is not None, "tokens without a request"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: Sequence[TokenUpdate]) -> None:
        for update in updates:
            receiver = self._receivers.get(update.request_id)
            if receiver is not None:
                receiver.put(update)


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


def _token_request(
    request: GenerateRequest, engine_id: str, prompt_ids: tuple[int, ...], adapter: AdapterUse | None = None
) -> TokenRequest:
    return TokenRequest(
        request_id=engine_id,
        prompt_token_ids=prompt_ids,
        sampling=request.sampling,
        trace=request.trace,
        t_engine_in_ns=request.t_engine_in_ns,
        priority=request.priority,
        cache_salt=request.cache_salt,
        sheddable=request.sheddable,
        adapter=adapter,
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

"""A Generator that plays a timing script instead of computing: for tests, and for people who test their clients.

The service model: `max_concurrency` requests run together, the others wait in order of arrival. A running request shows
its first token after ttft_ms + input tokens * prefill_ms_per_token, and then `tokens_per_chunk` tokens per
tokens_per_chunk * tpot_ms. All these times grow by the factor 1 + slowdown * (running - 1), and every gap is drawn
from a lognormal distribution of mean as given and coefficient of variation `jitter`. The script decides every token
and its probability is one, so sampling parameters have nothing to choose from.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from inferloop.backends import bytecodec
from inferloop.backends.assemble import Assembler
from inferloop.backends.protocols import Delta, GenerateRequest, GeneratorInfo, Preview, Prompt, StageTimes
from inferloop.core.clock import Clock, RealClock
from inferloop.core.digest import digest_of
from inferloop.core.errors import ContextLengthError, EngineError, OverloadedError, RequestError, UsageError, nearest
from inferloop.core.request import FinishReason
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.engine.schedule.step import TokenLogprob
from inferloop.engine.stats import EngineStats
from inferloop.engine.text.answer import AnswerStyle, untaught_style
from inferloop.models.identity import ServingIdentity

ErrorKind = Literal["engine", "overloaded", "stall"]


@dataclass(frozen=True, slots=True)
class Script:
    """Durations in milliseconds. `text` is the answer to everything; it repeats when a request ignores the end.

    `error_rate` of the requests fail: "overloaded" before the first token, "engine" after `error_after_tokens`,
    "stall" stops sending there and never ends. Raises UsageError for values that mean nothing.
    """

    ttft_ms: float = 20.0
    prefill_ms_per_token: float = 0.0
    tpot_ms: float = 5.0
    jitter: float = 0.0
    tokens_per_chunk: int = 1
    max_concurrency: int = 32
    max_waiting: int = 1024
    slowdown: float = 0.0
    text: str = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."
    error_rate: float = 0.0
    error_kind: ErrorKind = "engine"
    error_after_tokens: int = 3
    seed: int = 0
    context_length: int = 32768

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "prefill_ms_per_token", "tpot_ms", "jitter", "slowdown"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"script: {name} must be finite and not negative, got {value}")
        for name, least in (("tokens_per_chunk", 1), ("max_concurrency", 1), ("max_waiting", 0), ("context_length", 2)):
            if getattr(self, name) < least:
                raise UsageError(f"script: {name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.error_rate <= 1:
            raise UsageError(f"script: error_rate must be within 0..1, got {self.error_rate}")
        if not self.text:
            raise UsageError("script: text must not be empty")
        if self.error_kind not in get_args(ErrorKind):
            raise UsageError(f"script: error_kind={self.error_kind}: must be engine, overloaded or stall")

    @classmethod
    def parse(cls, pairs: Iterable[str]) -> Script:
        """From KEY=VALUE pairs. Raises UsageError naming the key, with the nearest valid one."""
        defaults: dict[str, Any] = {field.name: field.default for field in fields(cls)}
        values: dict[str, Any] = {}
        for pair in pairs:
            key, equals, text = pair.partition("=")
            if not equals:
                raise UsageError(f"--script {pair}: must be KEY=VALUE, as in ttft_ms=20")
            if key not in defaults:
                close = nearest(key, defaults)
                hint = f"did you mean {close}?" if close else f"known: {', '.join(defaults)}"
                raise UsageError(f"script: {pair}: unknown key {key!r} ({hint})")
            try:
                values[key] = type(defaults[key])(text)
            except ValueError:
                raise UsageError(f"script: {pair}: not a {type(defaults[key]).__name__}") from None
        return cls(**values)


class ScriptedGenerator:
    """Implements Generator and TextCodec. Lives on one event loop."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        model_id: str = "scripted",
        clock: Clock | None = None,
        answer_style: AnswerStyle | None = None,
    ) -> None:
        """`answer_style` is how the script's text is to be read; None: calls in the hermes dialect."""
        self.script = script or Script()
        self._clock = clock or RealClock()
        style = answer_style or untaught_style()
        self._random = random.Random(self.script.seed)
        self._answer = tuple(self.script.text.encode())
        self._slots = asyncio.Semaphore(self.script.max_concurrency)
        self._num_running = self._num_waiting = self._num_steps = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._info = GeneratorInfo(
            model_id=model_id,
            context_length=self.script.context_length,
            vocab_size=bytecodec.VOCAB_SIZE,
            identity=ServingIdentity(
                model_id=model_id,
                weights_digest=digest_of(self.script.text),
                precision="none",
                engine="scripted",
                engine_revision="1",
                tokenizer_digest=digest_of("utf-8 bytes"),
                template_digest=digest_of("start role newline content end"),
                stop_token_ids=(bytecodec.END,),
                config={**asdict(self.script), **asdict(style)},
            ),
            answer_style=style,
            fixed_answer=True,
        )

    def describe(self) -> tuple[GeneratorInfo, EngineStats]:
        stats = EngineStats(
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            step_counter=self._num_steps,
            kv_blocks_total=self.script.max_concurrency,
            kv_blocks_used=self._num_running,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )
        return self._info, stats

    def render(
        self,
        prompt: Prompt,
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Texts have no special tokens here."""
        return bytecodec.render(prompt, add_generation_prompt=add_generation_prompt)

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return bytecodec.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return bytecodec.token_bytes(token_id)

    async def preview(self, request: GenerateRequest) -> Preview:
        token_ids = bytecodec.render(request.prompt)
        return Preview(bytecodec.decode(token_ids), token_ids, self._max_tokens(request, len(token_ids)))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        if request.sampling.num_prompt_logprobs is not None:
            raise RequestError("a script knows no log-probabilities of prompts", param="prompt_logprobs")
        prompt_ids = bytecodec.render(request.prompt)
        max_tokens = self._max_tokens(request, len(prompt_ids))
        t_tokenized_ns = self._clock.now_ns()
        fails = self._random.random() < self.script.error_rate
        if fails and self.script.error_kind == "overloaded":
            raise OverloadedError("the script refuses this request")
        await self._take_slot()
        try:
            t_scheduled_ns = self._clock.now_ns()
            self._prompt_tokens += len(prompt_ids)
            player = _Player(self, request, prompt_ids, max_tokens, (t_tokenized_ns, t_scheduled_ns))
            async with contextlib.aclosing(player.play(fails=fails)) as deltas:
                async for delta in deltas:
                    self._num_steps += 1
                    self._generation_tokens += len(delta.token_ids)
                    yield delta
        finally:
            self._num_running -= 1
            self._slots.release()

    def _max_tokens(self, request: GenerateRequest, num_prompt: int) -> int:
        limit, asked = self.script.context_length, request.sampling.max_tokens
        param = "messages" if request.prompt.messages is not None else "prompt"
        if num_prompt >= limit:
            raise ContextLengthError(f"the prompt has {num_prompt} tokens, the context holds {limit}", param=param)
        if asked is None or request.sampling.cut_max_tokens:
            return min(asked or limit, limit - num_prompt)
        if num_prompt + asked > limit:
            raise ContextLengthError(
                f"{num_prompt} prompt tokens and max_tokens {asked} exceed the context of {limit}", param=param
            )
        return asked

    async def _take_slot(self) -> None:
        if self._slots.locked() and self._num_waiting >= self.script.max_waiting:
            raise OverloadedError("the queue is full")
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        self._num_running += 1

    def gap_ns(self, mean_ms: float) -> int:
        """One drawn duration under the present load."""
        mean_ns = mean_ms * NS_PER_MS * (1 + self.script.slowdown * (self._num_running - 1))
        if not self.script.jitter or not mean_ns:
            return int(mean_ns)
        variance = math.log1p(self.script.jitter**2)  # of the log, for a lognormal of this mean and cv
        return int(mean_ns * self._random.lognormvariate(-variance / 2, math.sqrt(variance)))

    async def sleep_until(self, t_ns: int) -> None:
        """Deadlines are absolute, so that late wake-ups do not add up."""
        await asyncio.sleep(max(0.0, (t_ns - self._clock.now_ns()) / NS_PER_S))

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def tokens(self, request: GenerateRequest) -> Iterator[int]:
        """The answer and its end, or the answer again and again."""
        sampling = request.sampling
        endless = sampling.ignore_eos
        for i in itertools.count():
            at_end = i > 0 and i % len(self._answer) == 0
            if at_end and not endless and i >= sampling.min_tokens:
                yield bytecodec.END
                return
            yield self._answer[i % len(self._answer)]


class _Player:
    """Plays one running request."""

    def __init__(
        self,
        generator: ScriptedGenerator,
        request: GenerateRequest,
        prompt_ids: tuple[int, ...],
        max_tokens: int,
        stamps: tuple[int, int],
    ) -> None:
        self._generator, self._script = generator, generator.script
        self._request, self._prompt_ids, self._max_tokens = request, prompt_ids, max_tokens
        self._t_tokenized_ns, self._t_scheduled_ns = stamps
        self._t_first_ns: int | None = None
        self._assembler = Assembler(bytecodec.ByteDecoder(), request.sampling)

    async def play(self, *, fails: bool) -> AsyncGenerator[Delta, None]:
        script, generator = self._script, self._generator
        first_ms = script.ttft_ms + script.prefill_ms_per_token * len(self._prompt_ids)
        due_ns = self._t_scheduled_ns + generator.gap_ns(first_ms)
        num_sent, left = 0, generator.tokens(self._request)
        while True:
            room = min(script.tokens_per_chunk, self._max_tokens - num_sent)
            ids = tuple(itertools.islice(left, room))
            await generator.sleep_until(due_ns)
            if fails and num_sent + len(ids) > script.error_after_tokens:
                await self._fail()
            delta = self._delta(ids, num_sent)
            num_sent += len(ids)
            yield delta
            if delta.finish_reason is not None:
                return
            due_ns += generator.gap_ns(script.tpot_ms * script.tokens_per_chunk)

    async def _fail(self) -> None:
        if self._script.error_kind == "stall":
            await asyncio.Event().wait()
        raise EngineError("the script fails this request")

    def _delta(self, ids: tuple[int, ...], num_before: int) -> Delta:
        now_ns = self._generator.now_ns()
        is_first, is_last = num_before == 0, num_before + len(ids) >= self._max_tokens
        self._t_first_ns = self._t_first_ns or now_ns
        stop_at = self._stop_at(ids, num_before)
        stop_id = None if stop_at is None else ids[stop_at]
        if stop_at is not None:
            ids = ids[: stop_at + 1]
        wants_logprobs = self._request.sampling.num_logprobs is not None
        logprobs = tuple(TokenLogprob(0.0, ((i, 0.0),)) for i in ids) if wants_logprobs else None
        piece = self._assembler.push(ids, logprobs, hide_last=stop_id is not None)
        text, stop = piece.text, piece.stop
        finish: FinishReason | None = None
        if stop is None and (stop_id is not None or is_last):
            rest, stop = self._assembler.flush()
            text += rest
            finish = "stop" if stop_id is not None else "length"
        if stop is not None:
            finish = "stop"
        return Delta(
            text=text,
            token_ids=piece.token_ids,
            t_ns=now_ns,
            logprobs=piece.logprobs,
            prompt_token_ids=self._prompt_ids if is_first else None,
            finish_reason=finish,
            stop_reason=stop or (stop_id if stop_id != bytecodec.END else None),
            times=self._times(now_ns) if is_first or finish is not None else None,
        )

    def _stop_at(self, ids: tuple[int, ...], num_before: int) -> int | None:
        """Which of `ids` ends the answer."""
        sampling = self._request.sampling
        for i, token_id in enumerate(ids):
            may_stop = num_before + i >= sampling.min_tokens
            if token_id == bytecodec.END or (token_id in sampling.stop_token_ids and may_stop):
                return i
        return None

    def _times(self, now_ns: int) -> StageTimes:
        return StageTimes(
            t_engine_in_ns=self._request.t_engine_in_ns,
            t_tokenized_ns=self._t_tokenized_ns,
            t_scheduled_ns=self._t_scheduled_ns,
            t_first_token_ns=self._t_first_ns,
            t_last_token_ns=now_ns,
        )

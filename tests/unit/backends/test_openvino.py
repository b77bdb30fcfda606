"""The generator around OpenVINO's pipeline, with a pipeline that computes nothing: it counts up from the prompt's last
token, and shows what it was asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.waiting import PATIENCE_S, until

from inferloop.backends import bytecodec, openvino
from inferloop.backends.engine_kind import Installation, ReplicaOptions
from inferloop.backends.openvino import OpenVinoGenerator
from inferloop.backends.openvino_pipeline import Handle, OpenVinoOptions, open_pipeline
from inferloop.backends.protocols import Delta, GenerateRequest, GeneratorInfo, Prompt
from inferloop.core.errors import EngineError, EnvironmentLacksError, OverloadedError, RequestError, UsageError
from inferloop.core.ids import TraceContext
from inferloop.core.request import Grammar, Sampling
from inferloop.models.identity import ServingIdentity
from inferloop.models.resolve import open_files

CONTEXT = 64


@dataclass
class CountingHandle:
    last: int
    left: int
    stop_ids: frozenset[int]
    ready: list[int] = field(default_factory=list)
    ended: Literal["stop", "length", "error"] | None = None
    cancelled: bool = False
    begun: bool = False

    def step(self) -> None:
        if self.ended is None and not self.cancelled:
            self.last += 1
            self.ready.append(self.last)
            self.left -= 1
            self.ended = "stop" if self.last in self.stop_ids else "length" if not self.left else None

    def read(self) -> tuple[tuple[int, ...], Literal["stop", "length", "error"] | None]:
        ids, self.ready = tuple(self.ready), []
        return ids, self.ended

    def cancel(self) -> None:
        self.cancelled = True


class CountingPipeline:
    version = "1"

    def __init__(self) -> None:
        self.settings: dict[str, str | int | bool] = {}
        self.handles: list[CountingHandle] = []
        self.asked: list[Sampling] = []
        self.fails: str | None = None
        self.ignores_all = False

    def add(
        self, number: int, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stop_ids: frozenset[int]
    ) -> Handle:
        if sampling.presence_penalty == 1.5:
            raise ValueError("no such penalty")
        handle = CountingHandle(prompt[-1], max_tokens, stop_ids, ended="error" if self.ignores_all else None)
        self.handles.append(handle)
        self.asked.append(sampling)
        return handle

    def step(self) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        for handle in self.handles:
            handle.step()


class StallingPipeline(CountingPipeline):
    """Gives a request its first token and never another."""

    def step(self) -> None:
        for handle in self.handles:
            if not handle.begun:
                handle.begun = True
                handle.step()


@contextlib.asynccontextmanager
async def running(pipeline: CountingPipeline, **options: Any) -> AsyncIterator[OpenVinoGenerator]:
    identity = ServingIdentity("m", "w", "q4_1", "openvino-genai", "1", "t", "c")
    info = GeneratorInfo("m", CONTEXT, identity, bytecodec.VOCAB_SIZE)
    made = OpenVinoGenerator(bytecodec.ByteCodec(), pipeline, info, (ord("z"),), OpenVinoOptions(**options))
    made.start()
    try:
        yield made
    finally:
        made.stop()


def request(text: str = "a", **sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", TraceContext.new(), Prompt(text=text), Sampling(**sampling), t_engine_in_ns=1)


async def answer(generator: OpenVinoGenerator, asked: GenerateRequest) -> list[Delta]:
    async with asyncio.timeout(PATIENCE_S):
        return [delta async for delta in generator.generate(asked)]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_tokens_become_an_answer() -> None:
    async with running(CountingPipeline()) as generator:
        deltas = await answer(generator, request("xa", max_tokens=4))
        assert text_of(deltas) == "bcde"
        assert deltas[0].prompt_token_ids == (ord("x"), ord("a"))
        assert [d.finish_reason for d in deltas][-1] == "length" and deltas[-1].times is not None
        _, stats = generator.describe()
        assert (stats.prompt_tokens, stats.generation_tokens, stats.num_running) == (2, 4, 0)


async def test_the_end_token_has_no_text_and_can_be_gone_past() -> None:
    async with running(CountingPipeline()) as generator:
        ended = await answer(generator, request("w", max_tokens=8))
        assert (text_of(ended), ended[-1].finish_reason, ended[-1].stop_reason) == ("xy", "stop", None)
        assert sum(len(d.token_ids) for d in ended) == 3, "the end token counts"
        on = await answer(generator, request("w", max_tokens=5, ignore_eos=True))
        assert (text_of(on), on[-1].finish_reason) == ("xyz{|", "length")
        asked = await answer(generator, request("a", max_tokens=8, stop_token_ids=(ord("d"),)))
        assert (text_of(asked), asked[-1].stop_reason) == ("bc", ord("d"))


async def test_a_stop_string_ends_the_answer_and_the_work() -> None:
    pipeline = CountingPipeline()
    async with running(pipeline) as generator:
        deltas = await answer(generator, request("a", max_tokens=50, stop=("de",)))
        assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop_reason) == ("bc", "stop", "de")
        await until(lambda: pipeline.handles[0].cancelled or pipeline.handles[0].ended is not None)


async def test_whoever_leaves_stops_costing() -> None:
    pipeline = CountingPipeline()
    async with running(pipeline) as generator:
        stream = generator.generate(request("\x01", max_tokens=60, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        await until(lambda: pipeline.handles[0].cancelled or pipeline.handles[0].ended is not None)
        assert generator.describe()[1].num_running == 0


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"num_logprobs": 0}, "logprobs"),
        ({"num_prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logit_bias": ((1, 2.0),)}, "logit_bias"),
        ({"grammar": Grammar("json_object", param="response_format")}, "response_format"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_it_has_not_is_refused_by_name(sampling: dict[str, Any], param: str) -> None:
    async with running(CountingPipeline()) as generator:
        with pytest.raises(RequestError) as refused:
            await answer(generator, request(**sampling))
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"),
    [(63, 1, True), (64, 1, False), (60, 5, False), (63, None, True), (64, None, False)],
)
async def test_the_context_is_kept(length: int, max_tokens: int | None, fits: bool) -> None:
    async with running(CountingPipeline()) as generator:
        asked = request("a" * length, max_tokens=max_tokens)
        if fits:
            assert (await answer(generator, asked))[-1].finish_reason == "length"
        else:
            with pytest.raises(RequestError, match="context") as refused:
                await answer(generator, asked)
            assert refused.value.code == "context_length_exceeded"


async def test_a_request_that_the_pipeline_refuses_does_not_end_the_others() -> None:
    async with running(CountingPipeline()) as generator:
        with pytest.raises(RequestError, match="no such penalty"):
            await answer(generator, request(presence_penalty=1.5))
        assert text_of(await answer(generator, request(max_tokens=1))) == "b"


async def test_a_full_queue_is_told() -> None:
    async with running(StallingPipeline(), max_sequences=1, max_waiting=0) as generator:
        first = generator.generate(request("\x01", max_tokens=60, ignore_eos=True))
        await anext(first)
        with pytest.raises(OverloadedError):
            await answer(generator, request())
        await first.aclose()


async def test_no_room_and_a_failure_are_errors_of_the_engine() -> None:
    pipeline = CountingPipeline()
    async with running(pipeline) as generator:
        pipeline.ignores_all = True
        with pytest.raises(EngineError, match="no room"):
            await answer(generator, request())
        assert generator.describe()[1].alive
        pipeline.fails = "the plug-in is gone"
        with pytest.raises(EngineError, match="the plug-in is gone"):
            await answer(generator, request())
        await until(lambda: not generator.describe()[1].alive)
        with pytest.raises(EngineError, match="the plug-in is gone"):
            await answer(generator, request())


async def test_stopping_ends_what_runs() -> None:
    async with running(StallingPipeline()) as generator:
        stream = generator.generate(request("\x01", max_tokens=60, ignore_eos=True))
        await anext(stream)
        await asyncio.to_thread(generator.stop)
        with pytest.raises(EngineError, match="stopped"):
            async for _ in stream:
                pass


def test_the_launched_form_is_our_own_serve(tiny_gguf: Callable[..., Path]) -> None:
    files = open_files("tiny", tiny_gguf())
    here = Installation("openvino", "2026.4", "openvino-genai", Path("/v/bin/python"), Path("/v/site"), "/v")
    spec = openvino.launch(here, ReplicaOptions("tiny", files, threads=2, kv="int8", prefix_cache=False))
    text = " ".join(spec.argv)
    assert "inferloop serve " in text
    for part in (
        "--backend openvino",
        "--engine-packages /v/site",
        "--threads 2",
        "--kv-dtype int8",
        "--no-enable-prefix-caching",
    ):
        assert part in text
    assert spec.version == "openvino-genai 2026.4" and spec.ready.path == "/health/ready"
    for wrong in ({"weights": "int8"}, {"activations": "int8"}, {"kv": "fp8"}, {"seed": 1}, {"tensor_parallel": 2}):
        with pytest.raises(UsageError, match="openvino"):
            openvino.launch(here, ReplicaOptions("tiny", files, **wrong))


def test_packages_of_another_python_are_refused(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    other = tmp_path / "lib" / "python3.8" / "site-packages"
    with pytest.raises(EnvironmentLacksError, match="another Python"):
        open_pipeline(open_files("tiny", tiny_gguf()), OpenVinoOptions(packages=other))

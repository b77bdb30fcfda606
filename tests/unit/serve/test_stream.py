"""Chunks go straight to the connection while it takes them, wait in order while it does not, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.types import Message

from inferloop.backends.bytecodec import VOCAB_SIZE
from inferloop.backends.native import NativeGenerator
from inferloop.backends.protocols import Delta, Generator
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.engine.compute.echo import EchoRunner
from inferloop.records.sink import DropSink
from inferloop.serve.answer import CHAT, COMPLETIONS, Dialect
from inferloop.serve.asgi import REQUEST_ID
from inferloop.serve.chat import ChatEncoder
from inferloop.serve.config import ServeConfig
from inferloop.serve.generate import GenerateEndpoint
from inferloop.serve.replica import Replica

Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]
BODY = {"model": "m", "stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": 60, "n": 2}


@contextlib.asynccontextmanager
async def made(native: Native, kind: str) -> AsyncIterator[Generator]:
    if kind == "scripted":
        yield ScriptedGenerator(Script(ttft_ms=0.1, tpot_ms=0.1), model_id="m")
        return
    async with native() as generator:
        yield generator


async def answered(
    generator: Generator, wait: Callable[[], Any], *, dialect: Dialect = COMPLETIONS, **body: Any
) -> tuple[bytes, int]:
    """The answer's body, and in how many parts it came, when the connection waits as `wait` does."""
    replica = Replica(generator, ServeConfig(), DropSink())
    asked = [json.dumps({**BODY, **body}).encode()]
    parts: list[bytes] = []
    sending = 0

    async def receive() -> Message:
        if asked:
            return {"type": "http.request", "body": asked.pop()}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal sending
        sending += 1
        assert sending == 1, "two parts at once"
        try:
            await wait()
        finally:
            sending -= 1
        if message["type"] == "http.response.body":
            parts.append(message["body"])

    await GenerateEndpoint(replica, dialect)({"type": "http", "headers": [], REQUEST_ID: "r"}, receive, send)
    assert replica.attempts == {}
    return b"".join(parts), len(parts)


def texts_of(body: bytes) -> list[str]:
    """Of each choice, which must have ended once."""
    *events, last = body.decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    texts, ends = ["", ""], [0, 0]
    for event in events:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            assert not ends[choice["index"]]
            texts[choice["index"]] += choice["text"]
            ends[choice["index"]] += choice["finish_reason"] is not None
    assert ends == [1, 1]
    return texts


async def at_once() -> None:
    pass


@pytest.mark.parametrize("kind", ["native", "scripted"])
@pytest.mark.parametrize("seed", range(4))
async def test_a_connection_that_makes_wait_gets_the_same_answer(native: Native, kind: str, seed: int) -> None:
    rng = random.Random(seed)

    async def sometimes() -> None:
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice([0, 0, 0.002]))

    async with made(native, kind) as generator:
        expected, _ = await answered(generator, at_once, prompt="hello")
        told, _ = await answered(generator, sometimes, prompt="hello")
    assert texts_of(told) == texts_of(expected) != ["", ""]


async def test_scores_of_a_prompt_made_beside_the_loop_come_first(native: Native) -> None:
    """A thread makes their chunk meanwhile the first tokens come."""
    async with native() as generator:
        told, _ = await answered(generator, at_once, prompt="hello", echo=True, logprobs=1)
        plain, _ = await answered(generator, at_once, prompt="hello", echo=True)
    assert texts_of(told) == texts_of(plain)
    assert all(text.startswith("hello") for text in texts_of(told))


async def test_a_step_is_one_part_for_each_choice(native: Native) -> None:
    async with native() as generator:
        _, num_parts = await answered(generator, at_once, prompt="hello")
    assert num_parts <= 2 * BODY["max_tokens"] + 1  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["native", "scripted"])
@pytest.mark.parametrize("waits", [False, True])
async def test_an_encoder_that_fails_ends_the_answer_and_the_request(
    native: Native, kind: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, num_left = ChatEncoder.chunk, 5

    def failing(self: ChatEncoder, index: int, delta: Delta) -> bytes:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise ZeroDivisionError("a bug")
        return chunk(self, index, delta)

    monkeypatch.setattr(ChatEncoder, "chunk", failing)

    async def wait() -> None:
        await asyncio.sleep(0.001 if waits else 0)

    async with made(native, kind) as generator:
        body = {"messages": [{"role": "user", "content": "x"}]}
        told, _ = await answered(generator, wait, dialect=CHAT, **body)
        assert told.count(b'"error":{') == 1 and b"[DONE]" not in told and b'"content":' in told
        async with asyncio.timeout(5):
            while (stats := generator.describe()[1]).num_running or stats.num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("waits", [False, True])
async def test_leaving_in_midstream_ends_what_catches_up(native: Native, waits: bool) -> None:
    began = asyncio.Event()

    async def wait() -> None:
        began.set()
        if waits:
            await asyncio.Event().wait()

    async with native(EchoRunner(vocab_size=VOCAB_SIZE, context_length=1024)) as generator:
        before = asyncio.all_tasks()
        task = asyncio.create_task(answered(generator, wait, prompt="hello", max_tokens=500))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        async with asyncio.timeout(5):
            while generator.describe()[1].num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

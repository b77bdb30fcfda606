"""Chunks go straight to the connection while it takes them, wait in order while it does not, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from starlette.types import Message
from tests.waiting import PATIENCE_S, skip, until

from inferloop.backends.bytecodec import VOCAB_SIZE
from inferloop.backends.native import NativeGenerator
from inferloop.backends.protocols import Delta, Generator
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.engine.compute.echo import EchoRunner
from inferloop.records.event import ReplicaEvent
from inferloop.records.sink import DropSink, Record, Sink
from inferloop.serve import endpoint, run, stream
from inferloop.serve.answer import CHAT, COMPLETIONS, Dialect
from inferloop.serve.app import build_app
from inferloop.serve.asgi import REQUEST_ID
from inferloop.serve.chat import ChatEncoder
from inferloop.serve.config import ServeConfig
from inferloop.serve.generate import GenerateEndpoint
from inferloop.serve.replica import Replica
from inferloop.serve.run import bind, serving

Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]
BODY = {"model": "m", "stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": 60, "n": 2}


@contextlib.asynccontextmanager
async def made(native: Native, kind: str) -> AsyncIterator[Generator]:
    if kind == "scripted":
        yield ScriptedGenerator(Script(ttft_ms=0.1, tpot_ms=0.1), model_id="m")
        return
    async with native(EchoRunner(vocab_size=VOCAB_SIZE, context_length=1024)) as generator:
        yield generator


async def answered(
    generator: Generator,
    wait: Callable[[], Any],
    *,
    dialect: Dialect = COMPLETIONS,
    sink: Sink | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
    **body: Any,
) -> tuple[bytes, int]:
    """The answer's body, and in how many parts it came, when the connection waits as `wait` does."""
    replica = Replica(generator, ServeConfig(), sink or DropSink())
    asked = [json.dumps({**BODY, **body}).encode()]
    parts: list[bytes] = []
    statuses: list[int] = []
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
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        else:
            assert statuses, "a body without a beginning"
            parts.append(message["body"])

    await GenerateEndpoint(replica, dialect)({"type": "http", "headers": headers, REQUEST_ID: "r"}, receive, send)
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
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
        told, _ = await answered(generator, wait, dialect=CHAT, **body)
        assert told.count(b'"error":{') == 1 and b"[DONE]" not in told and b'"content":' in told
        await until(lambda: generator.describe()[1].num_running + generator.describe()[1].num_waiting == 0)


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
        await until(lambda: not generator.describe()[1].num_running)


class Kept:
    def __init__(self) -> None:
        self.events: list[ReplicaEvent] = []

    def write(self, record: Record) -> None:
        assert isinstance(record, ReplicaEvent)
        self.events.append(record)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["native", "scripted"])
@pytest.mark.parametrize("bound", ["MAX_UNSENT_BYTES", "STALL_S"])
async def test_a_client_that_does_not_read_has_its_answer_ended(
    native: Native, kind: str, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody leaves and nothing times out: the request must not go on for ever."""
    monkeypatch.setattr(stream, bound, 20_000 if bound == "MAX_UNSENT_BYTES" else 0.1)
    monkeypatch.setattr(endpoint, "_TELL_TIMEOUT_S", 0.01)
    num_sends = 0

    async def wait() -> None:
        nonlocal num_sends
        num_sends += 1
        if num_sends > 3:
            await asyncio.Event().wait()

    sink = Kept()
    async with made(native, kind) as generator:
        async with asyncio.timeout(PATIENCE_S):
            await answered(generator, wait, sink=sink, prompt="hello", n=1, max_tokens=400)
        await until(lambda: not generator.describe()[1].num_running)
    (event,) = sink.events
    assert (event.finish_reason, event.error_class, event.status) == ("abort", "unread", 200)


async def test_what_waits_to_begin_has_not_begun(native: Native) -> None:
    """While the connection does not take the headers, what ends the answer still has a status of its own."""
    headers, sink = asyncio.Event(), Kept()

    async def wait() -> None:
        if not headers.is_set():
            headers.set()
            await asyncio.Event().wait()

    timeout = [(b"x-request-timeout-ms", b"50000")]
    async with made(native, "native") as generator, asyncio.timeout(PATIENCE_S):
        asked = asyncio.create_task(answered(generator, wait, sink=sink, headers=timeout, prompt="hello"))
        await headers.wait()
        skip(50)
        told, _ = await asked
    assert json.loads(told)["error"]["code"] == "timeout"
    assert [(e.error_class, e.status) for e in sink.events] == [("timeout", 408)]


async def test_a_connection_that_is_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer fits nowhere on the way, so the end of it can be told to nobody."""

    def small(host: str, port: int) -> socket.socket:
        listener = bind(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # as its connections will have
        return listener

    monkeypatch.setattr(run, "bind", small)
    monkeypatch.setattr(stream, "STALL_S", 0.1)
    monkeypatch.setattr(endpoint, "_TELL_TIMEOUT_S", 0.01)
    sink = Kept()
    app = build_app(ScriptedGenerator(Script(ttft_ms=0, tpot_ms=0.01), model_id="m"), ServeConfig(), sink)
    body = json.dumps({**BODY, "n": 1, "prompt": "x", "max_tokens": 2000}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    async with serving(app, wait_ready=True) as url, asyncio.timeout(2 * PATIENCE_S):
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", int(url.rpartition(":")[2])))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        await loop.sock_sendall(sock, head + body)
        await until(lambda: sink.events and not app.state.replica.attempts)
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := await loop.sock_recv(sock, 1 << 20):
                data += piece
    sock.close()
    assert data.startswith(b"HTTP/1.1 200 ") and b"[DONE]" not in data
    assert [(e.error_class, e.status) for e in sink.events] == [("unread", 200)]

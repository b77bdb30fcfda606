"""Requests that end before their answer is complete: overload, timeouts, and cancelling from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, skip, until

from inferloop.backends import bytecodec
from inferloop.backends.http import HttpClient, Response
from inferloop.backends.native import NativeGenerator
from inferloop.core.clock import Clock, VirtualClock
from inferloop.core.units import NS_PER_MS
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.schedule.step import StepResult
from inferloop.records.event import ReplicaEvent
from inferloop.records.sink import Record
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.replica import Replica
from inferloop.serve.run import serving

Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]
CONTEXT = 64
BLOCK = 4


class Paused(EchoRunner):
    """After `pause` every step waits for a permit, until `resume`."""

    def __init__(self) -> None:
        super().__init__(vocab_size=bytecodec.VOCAB_SIZE, context_length=CONTEXT, block_size=BLOCK, num_blocks=64)
        self._permits, self._paused = threading.Semaphore(0), False

    def pause(self) -> None:
        self._paused = True

    def step(self, num: int = 1) -> None:
        self._permits.release(num)

    def resume(self) -> None:
        self._paused = False
        self._permits.release()

    def wait(self) -> StepResult:
        if self._paused:
            assert self._permits.acquire(timeout=PATIENCE_S)
        return super().wait()


@dataclass
class Sink:
    events: list[ReplicaEvent] = field(default_factory=list)

    def write(self, record: Record) -> None:
        assert isinstance(record, ReplicaEvent)
        self.events.append(record)

    def close(self) -> None:
        pass


@dataclass
class Served:
    client: HttpClient
    runner: Paused
    generator: NativeGenerator
    replica: Replica
    sink: Sink

    async def post(
        self, body: dict[str, Any], *, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> Response:
        content = json.dumps({"model": "m", "prompt": "x", **body}).encode()
        return await self.client.request("POST", path, body=content, headers=(headers or {}).items())

    async def cancel(self, request_id: str) -> tuple[int, dict[str, Any]]:
        answer = await self.client.request("POST", f"/v1/requests/{request_id}/cancel", body=b"")
        return answer.status, await answer.json()

    async def metric(self, name: str) -> float:
        text = (await (await self.client.request("GET", "/metrics")).read()).decode()
        return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def held(self) -> tuple[int, int, int]:
        stats = self.generator.describe()[1]
        return stats.num_running, stats.num_waiting, stats.kv_blocks_used


@pytest.fixture
async def served(native: Native) -> AsyncIterator[Callable[..., Any]]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(config: ServeConfig | None = None, clock: Clock | None = None, **engine: Any) -> Served:
            runner, sink = Paused(), Sink()
            generator = await stack.enter_async_context(native(runner, clock=clock, **engine))
            app = build_app(generator, config or ServeConfig(), sink, clock=clock)
            url = await stack.enter_async_context(serving(app, wait_ready=True))
            client = HttpClient(url)
            stack.push_async_callback(client.close)
            stack.callback(runner.resume)
            return Served(client, runner, generator, app.state.replica, sink)

        yield start


def error_of(body: bytes) -> dict[str, Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line]
    found: dict[str, Any] = json.loads(lines[-1])["error"]
    return found


@pytest.mark.parametrize("stream", [True, False])
async def test_a_queue_of_one_and_twelve_clients(served: Callable[..., Any], stream: bool) -> None:
    s: Served = await served(max_sequences=1, max_waiting=1)
    s.runner.pause()
    calls = [asyncio.create_task(s.post({"max_tokens": 3, "stream": stream})) for _ in range(12)]
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: sum(call.done() for call in calls) == 10)
        for call in calls:
            if call.done():
                answer = call.result()
                assert answer.status == 503
                assert 1 <= int(answer.header("retry-after") or 0) <= 60
                assert error_of(await answer.read())["code"] == "overloaded"
        s.runner.resume()
        assert sorted([(await call).status for call in calls]) == [200] * 2 + [503] * 10
    assert await s.metric('inferloop_requests_shed_total{model_name="m",reason="queue_full"}') == 10


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 10**9, None])
@pytest.mark.parametrize("num_prompt", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 10**6])
async def test_around_the_context_limit_everything_ends_at_once(
    served: Callable[..., Any], num_prompt: int, max_tokens: int | None
) -> None:
    s: Served = await served()
    async with asyncio.timeout(PATIENCE_S):
        answer = await s.post({"prompt": "x" * num_prompt, "max_tokens": max_tokens, "ignore_eos": True})
        body = await answer.json()
    fits = num_prompt + (max_tokens if max_tokens is not None else 1) <= CONTEXT
    if max_tokens == 0 and fits:
        assert answer.status in (200, 400)
    elif fits:
        assert (answer.status, body["usage"]["completion_tokens"]) == (200, 1)
    else:
        assert answer.status == 400
        assert body["error"]["code"] == "context_length_exceeded" or body["error"]["param"] == "max_tokens"
    await until(lambda: s.held() == (0, 0, 0))


async def test_a_full_queue_is_told_before_any_text_is_looked_at(
    served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    s: Served = await served(max_sequences=1, max_waiting=0)
    s.runner.pause()
    call = asyncio.create_task(s.post({"max_tokens": 3}))
    await until(lambda: s.held()[0] == 1)
    monkeypatch.setattr(bytecodec.ByteCodec, "encode_text", lambda *_, **__: pytest.fail("tokenized"))
    assert (await s.post({"max_tokens": 3})).status == 503
    s.runner.resume()
    assert (await call).status == 200


async def test_prompts_are_bounded_by_tokens_too(served: Callable[..., Any]) -> None:
    s: Served = await served(max_sequences=1, max_waiting=50, max_waiting_tokens=40)
    s.runner.pause()
    calls = [asyncio.create_task(s.post({"max_tokens": 3}))]
    await until(lambda: s.held()[0] == 1)
    calls.append(asyncio.create_task(s.post({"prompt": "y" * 30, "max_tokens": 3})))
    await until(lambda: s.held()[1] == 1)
    assert await s.metric("inferloop_queue_tokens") == 30
    assert (await s.post({"prompt": "y" * 11, "max_tokens": 3})).status == 503
    calls.append(asyncio.create_task(s.post({"prompt": "y" * 10, "max_tokens": 3})))
    await until(lambda: s.held()[1] == 2)
    s.runner.resume()
    assert [(await call).status for call in calls] == [200] * 3
    assert await s.metric('inferloop_requests_shed_total{model_name="m",reason="queue_tokens"}') == 1
    assert await s.metric("inferloop_queue_tokens") == 0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_who_would_be_too_late_is_told_at_once(served: Callable[..., Any], stream: bool, n: int) -> None:
    """A first choice that cannot be in time ends the request; later choices are nobody's first token."""
    clock = VirtualClock()
    s: Served = await served(clock=clock, max_sequences=1, max_ttft_ms=60.0)
    s.runner.pause()
    first = asyncio.create_task(s.post({"max_tokens": 3, "n": n}))
    await until(lambda: s.held()[0] == 1)
    late = asyncio.create_task(s.post({"max_tokens": 3, "stream": stream, "n": n}))
    await until(lambda: s.held()[1] == 2 * n - 1)
    clock.advance(100 * NS_PER_MS)
    s.runner.resume()
    assert (await first).status == 200
    answer = await late
    assert answer.status == 503
    assert int(answer.header("retry-after") or 0) >= 1
    assert error_of(await answer.read())["code"] == "overloaded"
    await until(lambda: s.held() == (0, 0, 0))
    assert await s.metric('inferloop_requests_shed_total{model_name="m",reason="late"}') == 1


ENDLESS = {"max_tokens": CONTEXT - 1, "ignore_eos": True}


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("way", ["header", "server"])
async def test_a_request_that_takes_too_long_is_ended(served: Callable[..., Any], started: bool, way: str) -> None:
    s: Served = await served(ServeConfig(request_timeout_s=60.0 if way == "server" else None), max_sequences=2)
    s.runner.pause()
    headers = {"x-request-timeout-ms": "60000"} if way == "header" else {}
    call = asyncio.create_task(s.post({**ENDLESS, "stream": started, "n": 3}, headers=headers))
    await until(lambda: sum(s.held()[:2]) == 3)
    if started:
        s.runner.step(3)
        assert (await call).status == 200
    skip(60)
    answer = await call
    if not started:
        assert (answer.status, answer.header("x-should-retry")) == (408, "false")
    error = error_of(await answer.read())
    assert (error["code"], error["type"]) == ("timeout", "request_ended_error")
    s.runner.resume()
    await until(lambda: s.held() == (0, 0, 0))
    await until(lambda: len(s.sink.events) == 1)
    event = s.sink.events[0]
    assert (event.finish_reason, event.error_class, event.status) == ("abort", "timeout", 200 if started else 408)
    assert await s.metric('inferloop_requests_cut_short_total{model_name="m",reason="timeout"}') == 1


async def test_a_header_cannot_allow_more_than_the_server(served: Callable[..., Any]) -> None:
    s: Served = await served(ServeConfig(request_timeout_s=60.0))
    s.runner.pause()
    call = asyncio.create_task(s.post(ENDLESS, headers={"x-request-timeout-ms": "600000"}))
    await until(lambda: s.held()[0] == 1)
    skip(60)
    assert (await call).status == 408
    s.runner.resume()
    assert (await s.post({"max_tokens": 2})).status == 200


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "9" * 20, ""])
async def test_a_timeout_that_means_nothing_is_refused(served: Callable[..., Any], value: str) -> None:
    s: Served = await served()
    answer = await s.post({"max_tokens": 1}, headers={"x-request-timeout-ms": value})
    assert answer.status == 400
    assert error_of(await answer.read())["param"] == "x-request-timeout-ms"


@pytest.mark.parametrize("where", ["queued", "before the first token", "streaming"])
async def test_cancelling_from_outside(served: Callable[..., Any], where: str) -> None:
    s: Served = await served(max_sequences=4)
    s.runner.pause()
    other = asyncio.create_task(s.post({"prompt": "other", "max_tokens": 4, "stream": True}))
    await until(lambda: s.held()[0] == 1)
    if where == "queued":
        held = [asyncio.create_task(s.post({"prompt": f"filler{i}", "max_tokens": 4})) for i in range(3)]
    body = {**ENDLESS, "n": 4, "stream": where == "streaming"}
    calls = [asyncio.create_task(s.post(body, headers={"x-request-id": "mine"})) for _ in range(2)]
    await until(lambda: sum(s.held()[:2]) == 9 + 3 * (where == "queued"))
    if where == "streaming":
        s.runner.step(3)
        await until(lambda: any(call.done() for call in calls))
    assert (await s.cancel("unknown"))[0] == 404
    status, told = await s.cancel("mine")
    assert (status, told["request_id"], told["num_cancelled"]) == (200, "mine", 2)
    assert (await s.cancel("mine"))[0] == 404, "twice ends nothing more"
    for call in calls:
        answer = await call
        assert answer.status in ((200, 499) if where == "streaming" else (499,))
        assert error_of(await answer.read())["code"] == "cancelled"
    s.runner.resume()
    assert b"[DONE]" in await (await other).read()
    if where == "queued":
        assert [(await call).status for call in held] == [200] * 3
    await until(lambda: s.held() == (0, 0, 0))
    mine = [e for e in s.sink.events if e.request_id == "mine"]
    assert [(e.finish_reason, e.error_class) for e in mine] == [("abort", "cancelled")] * 2
    assert await s.metric('inferloop_requests_cut_short_total{model_name="m",reason="cancelled"}') == 2


async def test_a_cancelled_prefix_stays_reusable(served: Callable[..., Any]) -> None:
    s: Served = await served()
    s.runner.pause()
    call = asyncio.create_task(s.post({**ENDLESS, "prompt": "p" * 40, "max_tokens": 20}, headers={"x-request-id": "a"}))
    await until(lambda: s.held()[0] == 1)
    s.runner.step(3)
    await until(lambda: s.generator.describe()[1].generation_tokens > 2)
    await s.cancel("a")
    s.runner.resume()
    await call
    await until(lambda: s.held() == (0, 0, 0))
    answer = await (await s.post({"prompt": "p" * 40, "max_tokens": 1})).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 40 - BLOCK

"""Whatever happens to a request, it leaves exactly one event, and the counters agree with the events."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Message
from tests.waiting import until

from inferloop.backends import bytecodec
from inferloop.backends.http import HttpClient
from inferloop.backends.protocols import GeneratorInfo, Prompt
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.records.event import Content, ReplicaEvent
from inferloop.records.sink import JsonlSink, Record
from inferloop.serve import answer, app, endpoint, generate
from inferloop.serve.app import build_app
from inferloop.serve.asgi import REQUEST_ID
from inferloop.serve.config import ServeConfig
from inferloop.serve.replica import Replica
from inferloop.serve.run import serving
from inferloop.serve.wire import Call, parse_completion

FAST = Script(ttft_ms=2, tpot_ms=1, text="one two three four five six seven eight nine ten")


@dataclass
class ListSink:
    records: list[Record] = field(default_factory=list)

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass

    @property
    def events(self) -> list[ReplicaEvent]:
        return [r for r in self.records if isinstance(r, ReplicaEvent)]


@dataclass
class Served:
    client: HttpClient
    sink: ListSink
    replica: Replica
    content: ListSink

    async def post(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        response = await self.client.request(
            "POST", "/v1/completions", body=json.dumps({"model": "m", **body}).encode(), headers=(headers or {}).items()
        )
        return response.status, await response.read()

    async def event(self, num: int = 1) -> ReplicaEvent:
        await until(lambda: len(self.sink.events) >= num)
        assert len(self.sink.events) == num
        return self.sink.events[-1]


@contextlib.asynccontextmanager
async def served(script: Script = FAST, **config: Any) -> AsyncIterator[Served]:
    sink, content = ListSink(), ListSink()
    generator = ScriptedGenerator(script, model_id="m")
    made = build_app(generator, ServeConfig(replica="r1", **config), sink, content_sink=content)
    async with serving(made) as url:
        client = HttpClient(url)
        try:
            yield Served(client, sink, made.state.replica, content)
        finally:
            await client.close()


async def test_success_has_every_stamp_in_order() -> None:
    async with served(service="s") as s:
        headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "x-request-id": "my-id", "x-inferloop-class": "chat"}
        status, body = await s.post({"prompt": "hello", "max_tokens": 4, "temperature": 0}, headers)
        event = await s.event()
    assert status == 200 and json.loads(body)["choices"][0]["finish_reason"] == "length"
    assert (event.trace_id, event.parent_id, event.request_id) == ("ab" * 16, "cd" * 8, "my-id")
    assert (event.replica, event.service, event.traffic_class, event.status) == ("r1", "s", "chat", 200)
    assert (event.finish_reason, event.error_class, event.content_ref) == ("length", None, None)
    assert (event.num_input_tokens, event.num_output_tokens, event.num_cached_tokens) == (5, 4, 0)
    assert event.identity_digest == s.replica.info.identity.digest
    stamps = [
        event.t_engine_in_ns, event.t_tokenized_ns, event.t_scheduled_ns, event.t_first_token_ns,
        event.t_last_token_ns, event.t_sent_ns,
    ]  # fmt: skip
    known = [t for t in stamps if t is not None]
    assert len(known) == len(stamps) and known == sorted(known)
    assert len(event.token_offsets_us) == 4 and list(event.token_offsets_us) == sorted(event.token_offsets_us)
    assert event.token_offsets_us[0] == 0
    assert event.queue_ms is not None and event.prefill_ms is not None and event.t_first_token_ns is not None
    assert event.queue_ms + event.prefill_ms == pytest.approx((event.t_first_token_ns - event.t_engine_in_ns) / 1e6)


async def test_one_event_for_every_ending() -> None:
    """Good, refused, unknown model, broken JSON, overloaded, failed before and after the first token, left."""
    async with served() as s:
        await s.post({"prompt": "x", "stream": True, "max_tokens": 3})
        assert (await s.event(1)).finish_reason == "length"
        refused: list[dict[str, Any]] = [{"prompt": ""}, {"prompt": "x", "model": "other"}, {"prompt": "x", "n": 17}]
        for num, fields in enumerate(refused, 2):
            await s.post(fields)
            event = await s.event(num)
            assert (event.finish_reason, event.error_class) == ("error", "http_4xx")
            assert event.num_output_tokens == 0
        metrics = s.replica.metrics
        assert metrics.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}
        assert sum(metrics.refused.values()) == 3

    async with served(Script(error_rate=1.0, error_kind="overloaded")) as s:
        status, body = await s.post({"prompt": "x"})
        event = await s.event()
        assert (status, event.status, event.error_class) == (503, 503, "overloaded")
        assert json.loads(body)["error"]["code"] == "overloaded"

    for after, stream, status in ((0, True, 500), (0, False, 500), (2, False, 500), (2, True, 200)):
        async with served(Script(ttft_ms=1, tpot_ms=1, error_rate=1.0, error_after_tokens=after)) as s:
            seen, body = await s.post({"prompt": "x", "stream": stream, "max_tokens": 9})
            event = await s.event()
            assert (seen, event.status, event.error_class) == (status, status, "engine")
            assert event.num_output_tokens == after
            assert b'"error":{' in body and b"[DONE]" not in body
            assert s.replica.metrics.finished["error"] == 1
            assert s.replica.metrics.num_without_token == (1 if after == 0 else 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_panic_of_native_code_is_one_failed_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Panic(BaseException):
        pass

    def panic(prompt: Prompt) -> tuple[int, ...]:
        raise Panic(f"not a char boundary in {prompt.text}")

    async with served() as s:
        await until(lambda: s.replica.not_ready() is None)
        with monkeypatch.context() as patched:
            patched.setattr(bytecodec, "render", panic)
            status, body = await s.post({"prompt": "canary"})
        event = await s.event()
        assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
        assert (event.finish_reason, event.error_class, event.status) == ("error", "engine", 500)
        assert s.replica.attempts == {}
        assert (await s.post({"prompt": "x", "max_tokens": 1}))[0] == 200
    assert "canary" not in caplog.text and "Panic" in caplog.text


async def test_large_bodies_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def watched(body: bytes, info: GeneratorInfo) -> Call:
        threads.append(threading.get_ident())
        return parse_completion(body, info)

    monkeypatch.setattr(app, "COMPLETIONS", dataclasses.replace(answer.COMPLETIONS, parse=watched))
    async with served() as s:
        for num_chars, status in ((10, 200), (100_000, 400)):
            assert (await s.post({"prompt": "x" * num_chars, "max_tokens": 1}))[0] == status
    assert [t != threading.get_ident() for t in threads] == [False, True]


async def test_a_client_that_stopped_reading_does_not_hold_up_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_TELL_TIMEOUT_S", 0.01)
    sink, stuck = ListSink(), asyncio.Event()
    replica = Replica(ScriptedGenerator(FAST, model_id="m"), ServeConfig(drain_timeout_s=0), sink)
    messages = [{"type": "http.request", "body": b'{"model":"m","prompt":"x","stream":true}'}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            stuck.set()
            await asyncio.Event().wait()

    completions = generate.GenerateEndpoint(replica, answer.COMPLETIONS)
    answering = asyncio.create_task(completions({"type": "http", "headers": [], REQUEST_ID: "r"}, receive, send))
    await stuck.wait()
    async with asyncio.timeout(60):
        await replica.drain()
        await answering
    assert replica.attempts == {}
    assert [(e.finish_reason, e.error_class) for e in sink.events] == [("abort", "drain")]


@pytest.mark.parametrize("path", ["whole", "stream"])
async def test_a_torn_down_server_writes_no_second_event(path: str) -> None:
    """The answer is complete, but its client does not read its end."""
    sink, stuck = ListSink(), asyncio.Event()
    replica = Replica(ScriptedGenerator(FAST, model_id="m"), ServeConfig(), sink)
    asked = json.dumps({"model": "m", "prompt": "x", "stream": path == "stream"}).encode()
    messages = iter([{"type": "http.request", "body": asked}])

    async def receive() -> Message:
        found = next(messages, None)
        if found is None:
            await asyncio.Event().wait()
        assert found is not None
        return found

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            stuck.set()
            await asyncio.Event().wait()

    completions = generate.GenerateEndpoint(replica, answer.COMPLETIONS)
    answering = asyncio.create_task(completions({"type": "http", "headers": [], REQUEST_ID: "r"}, receive, send))
    await stuck.wait()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert replica.attempts == {} and [e.finish_reason for e in sink.events] == ["length"]


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_running_or_queued_aborts(stream: bool) -> None:
    async with served(Script(ttft_ms=30, tpot_ms=5, max_concurrency=2)) as s:
        body = json.dumps({"model": "m", "prompt": "x", "stream": stream, "max_tokens": 30_000, "ignore_eos": True})
        calls = [asyncio.create_task(s.client.request("POST", "/v1/completions", body=body.encode())) for _ in range(6)]
        await until(lambda: len(s.replica.attempts) == 6 and sum(call.done() for call in calls) == 2 * stream)
        for call in calls:
            if call.done():
                call.result().abort()
            call.cancel()
        await s.event(6)
        assert all((e.finish_reason, e.error_class) == ("abort", "disconnect") for e in s.sink.events)
        queued = [e for e in s.sink.events if e.t_first_token_ns is None]
        assert len(queued) >= 4
        generator = s.replica.generator
        await until(lambda: generator.describe()[1].num_running == generator.describe()[1].num_waiting == 0)
        assert s.replica.attempts == {}
        assert s.replica.metrics.finished["abort"] == 6


async def test_ttft_is_counted_once_per_request_with_a_token() -> None:
    """However many chunks: TTFT observations + endings without a token = finished requests."""
    async with served(Script(ttft_ms=3, tpot_ms=0.5, tokens_per_chunk=3)) as s:
        for _ in range(10):
            await s.post({"prompt": "x" * 50, "max_tokens": 11})
        await s.event(10)
        metrics = s.replica.metrics
    assert metrics.histograms["ttft"].count == 10 == sum(metrics.finished.values())
    assert metrics.histograms["ttft"].sum >= 10 * 0.003
    assert metrics.histograms["itl"].count == 10 * 8  # chunks of 3, 3, 3, 2: the later tokens, not the chunks
    assert metrics.generation_tokens == 110 and metrics.prompt_tokens == 500
    assert (
        metrics.histograms["tpot"].count == metrics.histograms["e2e"].count == metrics.histograms["queue"].count == 10
    )


CANARIES = ("secret-canary-123", "secret-canary-456")


async def test_nothing_of_the_content_leaks_by_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not into events, metrics, logs or standard output; not as token ids either, also when the request fails."""
    caplog.set_level(logging.DEBUG)
    prompt, answer = CANARIES
    for script in (
        Script(ttft_ms=1, tpot_ms=0, text=answer),
        Script(error_rate=1.0, error_after_tokens=4, text=answer),
    ):
        async with served(script) as s:
            await s.post({"prompt": prompt, "stop": ["never"], "user": prompt})
            await s.post({"prompt": prompt, "no_such": prompt})
            metrics = s.replica.metrics.render().decode()
            await s.event(2)
            told = msgspec.json.encode(s.sink.records).decode() + metrics + caplog.text + "".join(capfd.readouterr())
            assert s.content.records == []
        for canary in CANARIES:
            assert canary not in told
            assert str(list(canary.encode()))[1:-1].replace(" ", "") not in told.replace(" ", "")


@pytest.mark.parametrize(("capture", "with_text"), [("token_ids", False), ("text", True)])
async def test_captured_content_goes_to_its_own_file(tmp_path: Path, capture: str, with_text: bool) -> None:
    async with served(capture=capture, content_path=tmp_path / "e.content.jsonl") as s:
        await s.post({"prompt": "hello", "max_tokens": 3})
        event = await s.event()
        [content] = s.content.records
    assert isinstance(content, Content)
    assert event.content_ref == f"e.content.jsonl#{content.event_id}" == f"e.content.jsonl#{event.event_id}"
    assert content.input_token_ids == tuple(b"hello") and content.output_token_ids == tuple(b"one")
    assert (content.input_text, content.output_text) == (("hello", "one") if with_text else (None, None))


async def test_events_reach_the_file_when_the_server_stops(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    app = build_app(ScriptedGenerator(FAST, model_id="m"), ServeConfig(), sink)
    async with serving(app) as url:
        client = HttpClient(url)
        body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 2}).encode()
        for _ in range(5):
            await (await client.request("POST", "/v1/completions", body=body)).read()
        await client.close()
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=ReplicaEvent).num_output_tokens for line in lines] == [2] * 5

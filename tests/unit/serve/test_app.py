"""Routes, readiness, drain, limits, and the extension for load generators."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from tests.gates import GatedScript
from tests.waiting import skip, until, until_async

from inferloop.backends.http import HttpClient, Response
from inferloop.backends.protocols import GenerateRequest
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.core.errors import EngineError
from inferloop.records.sink import DropSink
from inferloop.serve import replica
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.openapi import openapi_document
from inferloop.serve.run import serving

TEXT = "Ñandú 삼겹살 👩‍👩‍👧‍👦 swim."


def make(script: Script | None = None, **config: Any) -> Starlette:
    generator = ScriptedGenerator(script or Script(ttft_ms=1, tpot_ms=0.5, text=TEXT), model_id="m")
    return build_app(generator, ServeConfig(replica="r1", **config), DropSink())


@contextlib.asynccontextmanager
async def client_of(app: Starlette) -> AsyncIterator[HttpClient]:
    async with serving(app) as url:
        client = HttpClient(url)
        try:
            yield client
        finally:
            await client.close()


async def is_ready(client: HttpClient) -> bool:
    return (await client.request("GET", "/health/ready")).status == 200


async def post(client: HttpClient, path: str, body: dict[str, Any], **headers: str) -> Response:
    data = json.dumps({"model": "m", **body}).encode()
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return await client.request("POST", path, body=data, headers=named)


def events_of(data: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_timings_extension_counts_tokens_per_chunk() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": {"include_usage": True}}
    async with client_of(make(Script(ttft_ms=1, tpot_ms=1, text=TEXT, tokens_per_chunk=3))) as client:
        response = await post(client, "/v1/chat/completions", body, x_inferloop_timings="1")
        events = events_of(await response.read())
        assert response.header("x-inferloop-replica") == "r1"
        plain = events_of(await (await post(client, "/v1/chat/completions", body)).read())
    counts = [event["inferloop"]["num_tokens"] for event in events]
    assert sum(counts) == events[-1]["usage"]["completion_tokens"] == len(TEXT.encode()) + 1
    assert events[0]["choices"][0]["delta"]["role"] == "assistant" and counts[0] == 0
    timings = events[-1]["inferloop"]
    assert timings["queue_ms"] >= 0 and timings["prefill_ms"] > 0 and timings["decode_ms"] > 0
    assert all("inferloop" not in event for event in plain)
    for seen in (events, plain):
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in seen if e["choices"]) == TEXT
        assert all(event["usage"] is None for event in seen[:-1])


async def test_ready_only_after_a_real_token(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cold(ScriptedGenerator):
        """Its first attempt fails. Each waits until it is let go."""

        def __init__(self) -> None:
            super().__init__(Script(ttft_ms=1), model_id="m")
            self.let_go, self.fails = asyncio.Semaphore(0), True

        async def generate(self, request: GenerateRequest) -> Any:
            await self.let_go.acquire()
            if self.fails:
                self.fails = False
                raise EngineError("no device yet")
            async for delta in super().generate(request):
                yield delta

    monkeypatch.setattr(replica, "_WARMUP_RETRY_S", 0.01)
    generator = Cold()
    async with client_of(build_app(generator, ServeConfig(), DropSink())) as client:

        async def told(path: str = "/health/ready") -> tuple[int, Any]:
            answer = await client.request("GET", path)
            return answer.status, (await answer.json()).get("reason")

        assert await told() == (503, "no token produced yet")
        assert (await told("/health/live"))[0] == 200
        generator.let_go.release()
        await until(lambda: not generator.fails)
        assert await told() == (503, "warm-up failed: no device yet")
        generator.let_go.release()
        await until_async(lambda: is_ready(client))
        assert (await told("/health"))[0] == 200


async def test_drain_refuses_new_finishes_running_and_tells_the_cut() -> None:
    generator = GatedScript(Script(ttft_ms=0, tpot_ms=2, text=TEXT))
    app = build_app(generator, ServeConfig(drain_timeout_s=60), DropSink())
    async with client_of(app) as client:
        await until_async(lambda: is_ready(client))
        generator.gate.clear()
        short = asyncio.create_task(post(client, "/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 20}))
        endless = {"prompt": "x", "max_tokens": 30_000, "ignore_eos": True}
        long = asyncio.create_task(post(client, "/v1/completions", endless | {"stream": True}))
        whole = asyncio.create_task(post(client, "/v1/completions", endless))
        await until(lambda: generator.describe()[1].num_running == 3)
        drain = asyncio.create_task(app.state.replica.drain())
        await until(lambda: app.state.replica.draining)
        ready = await client.request("GET", "/health/ready")
        assert (ready.status, (await ready.json())["reason"]) == (503, "draining")
        refused = await post(client, "/v1/completions", {"prompt": "x"})
        assert (refused.status, refused.header("retry-after")) == (503, "1")
        assert (await client.request("GET", "/health/live")).status == 200
        generator.gate.set()
        assert (await (await short).read()).endswith(b"data: [DONE]\n\n")
        assert not drain.done()
        await long
        skip(60)
        data = await (await long).read()
        assert b"shut down before the answer was complete" in data and b"[DONE]" not in data
        assert (await whole).status == 503
        await drain
        assert app.state.replica.attempts == {}


async def test_limits_and_unknown_paths_are_openai_errors() -> None:
    async with client_of(make(max_body_bytes=1000)) as client:
        for method, path, body, status, code in (
            ("POST", "/v1/completions", b"x" * 1001, 413, "request_too_large"),
            ("POST", "/tokenize", b"x" * 1001, 413, "request_too_large"),
            ("POST", "/tokenize", b"{}", 400, "invalid_value"),
            ("POST", "/tokenize", b'{"prompt":"a","messages":[]}', 400, "invalid_value"),
            ("POST", "/detokenize", b'{"tokens":[999]}', 400, "invalid_value"),
            ("GET", "/nowhere", None, 404, "not_found"),
            ("GET", "/v1/models/other", None, 404, "model_not_found"),
            ("GET", "/v1/completions", None, 405, "method_not_allowed"),
        ):
            response = await client.request(method, path, body=body)
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (status, code), path
            assert response.header("x-request-id")


async def test_a_wrong_method_is_told_the_right_one() -> None:
    async with client_of(make()) as client:
        for method, path, allowed in (("GET", "/v1/completions", "POST"), ("POST", "/metrics", "GET, HEAD")):
            response = await client.request(method, path, body=b"{}")
            await response.read()
            told = response.header("allow") or ""
            assert (response.status, ", ".join(sorted(told.split(", ")))) == (405, allowed)


@pytest.mark.parametrize("given", ["bad id\twith spaces", "x" * 500, "é"])
async def test_hostile_request_ids_are_replaced(given: str) -> None:
    async with client_of(make()) as client:
        response = await client.request("GET", "/health/live", headers=[("x-request-id", given)])
        assert (response.header("x-request-id") or "").startswith("req-")


async def test_identity_and_models_agree() -> None:
    app = make()
    async with client_of(app) as client:
        identity = await client.get_json("/identity")
        [model] = (await client.get_json("/v1/models"))["data"]
    assert identity["digest"] == model["identity_digest"] == app.state.replica.info.identity.digest
    assert identity["engine"] == "scripted"


async def test_every_route_is_described_and_every_description_is_a_route() -> None:
    """Those of batch jobs and adapters are there, too, in a document of their own: where a server has none of them they
    only say how to get them."""
    app = make()
    document, whole = openapi_document(), openapi_document(batches=True, adapters=True)
    described = {(path, m.upper()) for path, methods in whole["paths"].items() for m in methods}
    routes = {
        (route.path.replace(":path", ""), method)  # type: ignore[attr-defined]
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    assert described == routes
    assert {path for path in whole["paths"] if path not in document["paths"]} == {
        path for path in whole["paths"] if path.startswith(("/v1/files", "/v1/batches", "/v1/load_", "/v1/unload_"))
    }
    schemas = document["components"]["schemas"]
    chat = schemas["ChatRequest"]
    assert chat["additionalProperties"] is False and set(chat["required"]) == {"model", "messages"}
    for each in (document, whole):
        refs = {part.split('"')[0] for part in json.dumps(each).split("#/components/schemas/")[1:]}
        assert refs <= set(each["components"]["schemas"])
    async with client_of(app) as client:
        assert await client.get_json("/openapi.json") == json.loads(json.dumps(document))


def test_request_headers_are_described_where_they_are_read() -> None:
    paths = openapi_document()["paths"]
    told = {
        path: {p["name"] for p in methods["post"].get("parameters", []) if p["in"] == "header"}
        for path, methods in paths.items()
        if "post" in methods
    }
    common = {"x-request-id", "traceparent", "x-request-timeout-ms"}
    assert told["/v1/embeddings"] == common
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        assert told[path] == common | {"x-inferloop-timings"}


async def test_slow_readers_do_not_hold_others_up() -> None:
    """A client that does not read costs memory of its own stream only."""
    script = Script(ttft_ms=0, tpot_ms=0, text="x" * 64, tokens_per_chunk=64)
    async with client_of(make(script)) as client:
        endless = {"prompt": "x", "max_tokens": 30000, "ignore_eos": True, "stream": True}
        slow = await post(client, "/v1/completions", endless)
        fast = await post(client, "/v1/completions", {"prompt": "x", "max_tokens": 5})
        assert fast.status == 200
        assert b"[DONE]" in await slow.read()


async def test_a_bug_is_an_openai_error_with_a_request_id(caplog: pytest.LogCaptureFixture) -> None:
    class Buggy(ScriptedGenerator):
        broken = False

        def describe(self) -> Any:
            if self.broken:
                raise ZeroDivisionError("secret detail")
            return super().describe()

    generator = Buggy(Script(), model_id="m")
    async with client_of(build_app(generator, ServeConfig(), DropSink())) as client:
        generator.broken = True
        response = await client.request("GET", "/health/progress", headers=[("x-request-id", "find-me")])
        data = await response.read()
        generator.broken = False
    assert (response.status, json.loads(data)["error"]["code"]) == (500, "internal_error")
    assert response.header("x-request-id") == "find-me" and b"secret" not in data
    assert "find-me" in caplog.text and "ZeroDivisionError" in caplog.text
    assert caplog.text.count("secret detail") == caplog.text.count('ZeroDivisionError("secret detail")')  # source lines


@pytest.mark.parametrize("stream", [True, False])
async def test_every_client_of_a_full_queue_gets_an_answer(stream: bool) -> None:
    generator = GatedScript(Script(ttft_ms=0, tpot_ms=0, max_concurrency=1, max_waiting=1))
    async with client_of(build_app(generator, ServeConfig(), DropSink())) as client:
        await until_async(lambda: is_ready(client))
        generator.gate.clear()
        body = {"prompt": "x", "max_tokens": 3, "stream": stream}
        asked = [asyncio.create_task(post(client, "/v1/completions", body)) for _ in range(12)]
        await until(lambda: sum(one.done() for one in asked) == 10)
        generator.gate.set()
        answers = await asyncio.gather(*asked)
        statuses = sorted(answer.status for answer in answers)
        for answer in answers:
            data = await answer.read()
            if answer.status == 503:
                assert answer.header("retry-after") == "1" and json.loads(data)["error"]["code"] == "overloaded"
    assert statuses == [200] * 2 + [503] * 10


@pytest.mark.parametrize("n", [1, 2])
async def test_continuous_usage_grows_to_the_last(n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    async with client_of(make(Script(ttft_ms=0, tpot_ms=0, text=TEXT, tokens_per_chunk=5))) as client:
        for path, body in (("chat/completions", chat), ("completions", {"prompt": "hello", "max_tokens": 99})):
            asked = {**body, "n": n, "stream": True, "stream_options": options}
            events = events_of(await (await post(client, f"/v1/{path}", asked)).read())
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts) and counts[-1] == n * (len(TEXT.encode()) + 1)
            assert len(set(counts)) > 5 and counts[0] <= 5
            assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
            assert events[-1]["choices"] == [] and events[-1]["usage"]["prompt_tokens"] > 0
        alone = await post(
            client,
            "/v1/chat/completions",
            {**chat, "stream": True, "stream_options": {**options, "include_usage": False}},
        )
        assert (await alone.json())["error"]["param"] == "stream_options.continuous_usage_stats"


@pytest.mark.parametrize(
    ("asked", "finish", "reason"),
    [
        ({"stop": ["zz", "swim"]}, "stop", "swim"),
        ({"stop_token_ids": [ord("w")]}, "stop", ord("w")),
        ({}, "stop", None),
        ({"max_tokens": 3}, "length", None),
    ],
)
async def test_what_stopped_an_answer_is_told(asked: dict[str, Any], finish: str, reason: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    async with client_of(make(Script(ttft_ms=0, tpot_ms=0, text=TEXT, tokens_per_chunk=5))) as client:
        for path, body in (("chat/completions", chat), ("completions", {"prompt": "hello"})):
            body = {"max_tokens": 99, **body, **asked, "n": 2}
            whole = await (await post(client, f"/v1/{path}", body)).json()
            told = [(choice["index"], choice["finish_reason"], choice["stop_reason"]) for choice in whole["choices"]]
            assert told == [(0, finish, reason), (1, finish, reason)]
            events = events_of(await (await post(client, f"/v1/{path}", {**body, "stream": True})).read())
            ended = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
            assert sorted((c["index"], c["finish_reason"], c["stop_reason"]) for c in ended) == told

"""A server behind a URL, put behind our own HTTP side, still answers as every backend must."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from inferloop.backends.conformance import CHECKS, Check, Target, run_check
from inferloop.backends.http import HttpClient
from inferloop.backends.protocols import Delta, GenerateRequest, Prompt
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.backends.url import UrlGenerator
from inferloop.core.errors import EngineError, EnvironmentLacksError
from inferloop.core.ids import TraceContext
from inferloop.core.request import Sampling
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving

SCRIPT = Script(ttft_ms=1, tpot_ms=0.2, context_length=4000, text="The sea is wide. Ñandú 삼겹살 👩‍👩‍👧‍👦 swim in it. ")
REFUSED = {"prompt_usage", "token_prompt", "detokenize", "logprobs", "echo_logprobs", "embeddings"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
async def test_url(check: Check) -> None:
    behind = build_app(ScriptedGenerator(SCRIPT, model_id="m"), ServeConfig(), DropSink())
    async with serving(behind) as url:
        generator = await UrlGenerator.connect(url, "m")
        async with serving(build_app(generator, ServeConfig(), DropSink()), wait_ready=True) as front:
            client = HttpClient(front)
            result = await run_check(check, Target(client, "m"))
            await client.close()
        await generator.close()
    assert result.outcome == ("refused" if result.name in REFUSED else "passed"), result.reason


async def test_counts_and_failures_come_through() -> None:
    script = Script(ttft_ms=1, tpot_ms=1, tokens_per_chunk=4, error_rate=1.0, error_after_tokens=6)
    for rate in (0.0, 1.0):
        failing = Script(**{**{f: getattr(script, f) for f in script.__dataclass_fields__}, "error_rate": rate})
        behind = build_app(ScriptedGenerator(failing, model_id="m"), ServeConfig(), DropSink())
        async with serving(behind) as url:
            generator = await UrlGenerator.connect(url, "m")
            assert generator.describe()[0].identity == behind.state.replica.info.identity
            async with serving(build_app(generator, ServeConfig(), DropSink()), wait_ready=True) as front:
                client = HttpClient(front)
                body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 9}).encode()
                answer = await client.request("POST", "/v1/completions", body=body)
                told = await answer.json()
                await client.close()
            await generator.close()
        if rate:
            assert (answer.status, told["error"]["code"]) == (500, "engine_error")
        else:
            usage = told["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 9)


async def test_what_is_asked_goes_along() -> None:
    asked: list[GenerateRequest] = []
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages: tuple[dict[str, Any], ...] = (
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "name": "f", "tool_call_id": "c"},
    )
    tools = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)

    class Remembers(ScriptedGenerator):
        def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
            asked.append(request)
            plain = replace(request.prompt, variables={})  # which a script has no template for
            return super().generate(replace(request, prompt=plain))

    app = build_app(Remembers(SCRIPT, model_id="m"), ServeConfig(), DropSink())
    async with serving(app, wait_ready=True) as url:
        generator = await UrlGenerator.connect(url, "m")
        prompt = Prompt(messages=messages, tools=tools, variables={"style": ["brief"]})
        sampling = Sampling(max_tokens=1)
        request = GenerateRequest("r", TraceContext.new(), prompt, sampling, 0, priority=9, cache_salt="s")
        async for _ in generator.generate(request):
            pass
        await generator.close()
    assert (asked[-1].priority, asked[-1].cache_salt) == (9, "s")
    assert asked[-1].prompt == prompt


async def test_connecting_to_nothing_says_so() -> None:
    with pytest.raises(EnvironmentLacksError, match="does not answer"):
        await UrlGenerator.connect("http://127.0.0.1:1", "m")
    app = build_app(ScriptedGenerator(SCRIPT, model_id="m"), ServeConfig(), DropSink())
    async with serving(app) as url:
        with pytest.raises(EnvironmentLacksError, match="serves m, not 'x'"):
            await UrlGenerator.connect(url, "x")


@pytest.mark.parametrize("event", [b"{", b"[]", b'{"choices":[{}]}', b'{"choices":[{"delta":7}]}', b'{"error":1}'])
async def test_nonsense_from_behind_is_an_engine_error(event: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body, kind = b'{"data":[{"id":"m"}]}', b"application/json"
        if head.startswith(b"POST"):
            body, kind = b"data: " + event + b"\n\ndata: [DONE]\n\n", b"text/event-stream"
        status = b"404 Not Found" if b"/identity" in head else b"200 OK"
        writer.write(b"HTTP/1.1 %b\r\ncontent-type: %b\r\nconnection: close\r\n" % (status, kind))
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    generator = await UrlGenerator.connect(f"http://{host}:{port}", "m")
    asked = GenerateRequest("r", TraceContext.new(), Prompt(text="x"), Sampling(), 0)
    with pytest.raises(EngineError):
        async for _ in generator.generate(asked):
            pass
    assert generator.describe()[1].num_running == 0
    await generator.close()
    server.close()
    await server.wait_closed()

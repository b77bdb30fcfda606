"""Through the gateway a replica passes exactly the checks it passes alone; the OpenAI client sees no gateway."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam
from tests.waiting import PATIENCE_S

from inferloop.backends.conformance import run_checks
from inferloop.backends.serve_process import launch_spec
from inferloop.core.secret import Secret
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.process import log_tail
from inferloop.fleet.act.supervise import Fleet, FleetConfig
from inferloop.serve.keys import ApiKeys

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    spec = launch_spec("demo", {"script": ["ttft_ms=2", "tpot_ms=2"], "replica": "{replica}"}, backend="scripted")
    async with Fleet(spec, FleetConfig(tmp_path, probe_period_s=0.2)) as running:
        await running.start(1)
        yield running


async def test_the_gateway_changes_no_check(fleet: Fleet) -> None:
    url = fleet.status().replicas[0].url
    assert url is not None
    alone = await run_checks(url, "demo")
    behind = await run_checks(fleet.url, "demo")
    assert [(c.name, c.outcome) for c in behind] == [(c.name, c.outcome) for c in alone]
    assert not [c for c in behind if c.outcome == "failed"] and len(behind) > 10


async def test_the_openai_client_enters_with_the_callers_key_alone(tmp_path: Path) -> None:
    """Callers have one key, the gateway has another for its replicas, and neither opens the other's door."""
    callers, replicas = Secret("sk-callers-3f0a"), Secret("sk-replicas-77c1")
    spec = launch_spec("demo", {"script": ["ttft_ms=2", "tpot_ms=2"], "replica": "{replica}"}, backend="scripted")
    config = FleetConfig(tmp_path, gateway=GatewayConfig(keys=ApiKeys((callers,))))
    async with Fleet(replace(spec, api_key=replicas), config) as fleet:
        await fleet.start(1)
        url = fleet.status().replicas[0].url
        for base_url, key in ((fleet.url, replicas), (fleet.url, Secret("none")), (url, callers)):
            async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key.reveal()) as client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await client.chat.completions.create(model="demo", messages=HI)
                assert refused.value.code == "invalid_api_key" and key.reveal() not in str(refused.value)
        async with openai.AsyncOpenAI(base_url=fleet.url + "/v1", api_key=callers.reveal()) as client:
            assert [model.id async for model in client.models.list()] == ["demo"]
            assert (await client.chat.completions.create(model="demo", messages=HI)).choices[0].message.content
            stream = await client.chat.completions.create(model="demo", messages=HI, stream=True)
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"
    log = log_tail(tmp_path / "r0.log", 1000)
    assert not any(key.reveal() in log for key in (callers, replicas))


@pytest.mark.parametrize("kind", ["chat", "responses"])
async def test_the_openai_client_sees_a_broken_stream_as_an_api_error(fleet: Fleet, kind: str) -> None:
    async with openai.AsyncOpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["demo"]
        stream: AsyncIterator[object]
        endless = {"ignore_eos": True}  # or the script may be through before the replica dies
        if kind == "chat":
            stream = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "Hi"}],
                stream=True,
                max_tokens=30_000,
                extra_body=endless,
            )
        else:
            stream = await client.responses.create(
                model="demo", input="Hi", stream=True, max_output_tokens=30_000, extra_body=endless
            )
        pid = fleet.status().replicas[0].pid
        assert pid is not None
        with pytest.raises(openai.APIError, match="in the middle of the answer"):
            async for i, _ in _counted(stream):
                if i == 3:
                    os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while True:  # a request that meets the dying replica is a 502 of its own; then nobody is left
                with pytest.raises(openai.InternalServerError) as refused:
                    while True:
                        await client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}])
                if re.search(r"no replica (is ready|can be reached)", str(refused.value)):
                    return


async def _counted(stream: AsyncIterator[object]) -> AsyncIterator[tuple[int, object]]:
    i = 0
    async for item in stream:
        yield i, item
        i += 1

"""Clients that leave a real engine at random moments cost nothing afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re

from tests.waiting import PATIENCE_S, until_async, until_idle

from inferloop.backends.http import HttpClient
from inferloop.models.resolve import ModelFiles


async def is_free(client: HttpClient) -> bool:
    """Nobody is answered, and no memory is taken. A request that was sent and left at once may still come after that,
    so all of it has to be so together."""
    await until_idle(client)
    metrics = (await (await client.request("GET", "/metrics")).read()).decode()
    again = await client.get_json("/health/progress", timeout_s=PATIENCE_S)
    free = re.search(r"^inferloop_kv_usage_ratio\S* 0\.0$", metrics, re.MULTILINE)
    return free is not None and again["alive"] and again["in_flight"] == 0


async def test_leaving_at_random_times(served_model: str, embedded_model: ModelFiles) -> None:
    """Streamed and not, of one choice and of four, queued, prefilling in chunks, decoding: all is free again, and the
    server still answers."""
    rng = random.Random(7)
    client = HttpClient(served_model)

    async def leaver(stream: bool) -> None:
        body = {
            "model": embedded_model.model_id, "prompt": "word " * rng.choice((1, 50, 700)), "stream": stream,
            "max_tokens": 1000, "ignore_eos": True, "n": rng.choice((1, 4)),
        }  # fmt: skip
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.0, 1.0)):
                response = await client.request("POST", "/v1/completions", body=json.dumps(body).encode())
                async for _ in response.pieces():
                    pass

    for _ in range(2):
        await asyncio.gather(*(leaver(stream=i % 2 == 0) for i in range(20)))
    await until_async(lambda: is_free(client))
    question = {"messages": [{"role": "user", "content": "What is the capital of Germany?"}], "max_tokens": 20}
    body = json.dumps({"model": embedded_model.model_id, "temperature": 0, **question}).encode()
    answer = await (await client.request("POST", "/v1/chat/completions", body=body)).json()
    assert "Berlin" in answer["choices"][0]["message"]["content"]
    await client.close()


async def test_leaving_four_choices(served_model: str, embedded_model: ModelFiles) -> None:
    client = HttpClient(served_model)
    body = {
        "model": embedded_model.model_id, "prompt": "Count: 1 2 3", "n": 4, "stream": True, "max_tokens": 4000,
        "ignore_eos": True,
    }  # fmt: skip
    response = await client.request("POST", "/v1/completions", body=json.dumps(body).encode())
    seen = b""
    async for _, piece in response.pieces():
        seen += piece
        if all(b'"index":%d' % i in seen for i in range(4)):
            break
    assert (await client.get_json("/health/progress", timeout_s=PATIENCE_S))["running"] == 4
    response.abort()
    await until_async(lambda: is_free(client))
    await client.close()

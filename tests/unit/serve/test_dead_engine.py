"""An engine that dies takes nobody's answer with it silently: every client is told, and so is every probe."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gates import GatedRunner
from tests.waiting import until

from inferloop.backends import bytecodec
from inferloop.backends.http import HttpClient
from inferloop.backends.native import NativeGenerator
from inferloop.records.sink import JsonlSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving

Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]


@pytest.mark.parametrize("stream", [True, False])
async def test_everybody_learns_of_a_dead_engine(native: Native, tmp_path: Path, stream: bool) -> None:
    runner = GatedRunner(vocab_size=bytecodec.VOCAB_SIZE)
    sink = JsonlSink(tmp_path / "events.jsonl")
    async with (
        native(runner, max_sequences=2) as generator,
        serving(build_app(generator, ServeConfig(), sink), wait_ready=True) as url,
    ):
        client = HttpClient(url)

        async def ask() -> tuple[int, bytes]:
            body = {"model": "m", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream}
            answer = await client.request("POST", "/v1/completions", body=json.dumps(body).encode())
            return answer.status, await answer.read()

        runner.gate.clear()
        clients = [asyncio.create_task(ask()) for _ in range(5)]
        await until(lambda: generator.describe()[1].num_running + generator.describe()[1].num_waiting == 5)
        runner.num_good_steps = 20
        runner.gate.set()
        answers = [*await asyncio.gather(*clients), await ask()]
        live, ready = [await client.request("GET", f"/health/{probe}") for probe in ("live", "ready")]
        metrics = await (await client.request("GET", "/metrics")).read()
        progress = await client.get_json("/health/progress")
        reason = (await ready.json())["reason"]
        await client.close()
    assert all(b'"code":"engine_error"' in body and b"[DONE]" not in body for _, body in answers)
    assert {status for status, body in answers if not body.startswith(b"data:")} <= {500}
    assert (live.status, ready.status, reason) == (200, 503, "the engine has stopped")
    assert progress == {**progress, "alive": False, "running": 0, "waiting": 0, "in_flight": 0}
    assert b'inferloop_engine_alive{model_name="m"} 0.0' in metrics
    events = [json.loads(line) for line in sink.path.read_text().splitlines()]
    assert [(e["finish_reason"], e["error_class"]) for e in events] == [("error", "engine")] * 6

"""An engine that dies takes nobody's answer with it silently: every client is told, and so is every probe."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from inferloop.backends import bytecodec
from inferloop.backends.http import HttpClient
from inferloop.backends.native import NativeGenerator
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.schedule.step import StepResult
from inferloop.records.sink import JsonlSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving

Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]


class Mortal(EchoRunner):
    dying = False

    def wait(self) -> StepResult:
        if self.dying:
            raise RuntimeError("the device fell off the bus")
        return super().wait()


@pytest.mark.parametrize("stream", [True, False])
async def test_everybody_learns_of_a_dead_engine(native: Native, tmp_path: Path, stream: bool) -> None:
    runner = Mortal(vocab_size=bytecodec.VOCAB_SIZE, context_length=100_000, block_size=64, num_blocks=4000)
    sink = JsonlSink(tmp_path / "events.jsonl")
    async with (
        native(runner, max_sequences=2) as generator,
        serving(build_app(generator, ServeConfig(), sink), wait_ready=True) as url,
    ):
        client = HttpClient(url)

        async def ask() -> tuple[int, bytes]:
            body = {"model": "m", "prompt": "x", "max_tokens": 90_000, "ignore_eos": True, "stream": stream}
            answer = await client.request("POST", "/v1/completions", body=json.dumps(body).encode())
            return answer.status, await answer.read()

        clients = [asyncio.create_task(ask()) for _ in range(5)]
        while (await client.get_json("/health/progress"))["in_flight"] < 5:  # noqa: ASYNC110  another side's state
            await asyncio.sleep(0.005)
        runner.dying = True
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

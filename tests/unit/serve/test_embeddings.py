"""/v1/embeddings through HTTP, on an engine whose hidden states are known."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import PATIENCE_S, until

from inferloop.backends import bytecodec
from inferloop.backends.http import HttpClient
from inferloop.backends.native import NativeGenerator
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.engine.compute.echo import HIDDEN_SIZE, EchoRunner, hidden_state
from inferloop.engine.schedule.step import StepResult
from inferloop.records.event import ReplicaEvent
from inferloop.records.sink import JsonlSink, Record
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.replica import Replica
from inferloop.serve.run import serving

Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]
CONTEXT = 256


@dataclass
class ListSink:
    records: list[Record] = field(default_factory=list)

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


class Runner(EchoRunner):
    """Can be held up in the middle of a step, and counts its steps."""

    def __init__(self) -> None:
        super().__init__(vocab_size=bytecodec.VOCAB_SIZE, context_length=CONTEXT, num_blocks=200, block_size=8)
        self.free_to_go = threading.Event()
        self.free_to_go.set()
        self.num_steps = 0

    def wait(self) -> StepResult:
        assert self.free_to_go.wait(PATIENCE_S)
        self.num_steps += 1
        return super().wait()


@dataclass
class Served:
    http: HttpClient
    generator: NativeGenerator
    runner: Runner
    replica: Replica
    sink: ListSink

    async def post(self, **body: Any) -> tuple[int, Any]:
        sent = json.dumps({"model": "m", **body}).encode()
        response = await self.http.request("POST", "/v1/embeddings", body=sent)
        return response.status, json.loads(await response.read())

    async def vectors(self, **body: Any) -> list[Any]:
        status, answer = await self.post(**body)
        assert status == 200, answer
        assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
        return [entry["embedding"] for entry in answer["data"]]

    async def refused(self, **body: Any) -> tuple[str | None, str]:
        status, answer = await self.post(**body)
        assert status == 400, answer
        return answer["error"]["param"], answer["error"]["code"]


@pytest.fixture
async def served(native: Native) -> AsyncIterator[Served]:
    runner, sink = Runner(), ListSink()
    async with native(runner, max_step_tokens=50, max_sequences=6, max_waiting=60) as generator:
        app = build_app(generator, ServeConfig(), sink)
        async with serving(app, wait_ready=True) as url:
            http = HttpClient(url)
            yield Served(http, generator, runner, app.state.replica, sink)
            await http.close()


def truth(ids: list[int]) -> list[float]:
    mean = np.mean([hidden_state(ids[: i + 1]) for i in range(len(ids))], axis=0)
    vector: list[float] = (mean / np.linalg.norm(mean)).astype(np.float32).tolist()
    return vector


async def test_every_form_of_input(served: Served) -> None:
    one, two = list(b"a text"), list("été".encode())
    assert await served.vectors(input="a text") == [truth(one)]
    assert await served.vectors(input=one) == [truth(one)]
    assert await served.vectors(input=["a text", "été"]) == [truth(one), truth(two)]
    assert await served.vectors(input=[one, two, one]) == [truth(one), truth(two), truth(one)]
    assert await served.vectors(input="a text", dimensions=HIDDEN_SIZE, encoding_format="float", user="u") == [
        truth(one)
    ]
    [coded] = await served.vectors(input="a text", encoding_format="base64")
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == truth(one)
    assert np.linalg.norm(truth(one)) == pytest.approx(1)


async def test_usage_events_and_metrics(served: Served) -> None:
    served.sink.records.clear()
    status, answer = await served.post(input=["abc", "abc", "de"])
    assert status == 200
    assert answer["object"] == "list" and answer["model"] == "m"
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    [event] = served.sink.records
    assert isinstance(event, ReplicaEvent)
    assert (event.num_input_tokens, event.num_output_tokens, event.num_cached_tokens) == (8, 0, 0)
    assert (event.finish_reason, event.status, event.error_class) == ("stop", 200, None)
    assert event.t_first_token_ns is None and event.t_scheduled_ns is not None and event.t_tokenized_ns is not None
    metrics = served.replica.metrics
    assert (metrics.finished["stop"], metrics.num_without_token, metrics.prompt_tokens) == (1, 1, 8)
    assert [metrics.histograms[key].count for key in ("e2e", "prompt", "ttft")] == [1, 1, 0]


async def test_more_inputs_than_the_queue_holds(served: Served) -> None:
    """Beside answers that stream: they share steps, and nobody is turned away."""
    texts = [f"text number {i}" for i in range(300)]
    steps_before = served.runner.num_steps
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 100, "ignore_eos": True}).encode()
    chat = asyncio.create_task(served.http.request("POST", "/v1/completions", body=body))
    assert await served.vectors(input=texts) == [truth(list(text.encode())) for text in texts]
    assert (await chat).status == 200
    await (await chat).read()
    assert served.runner.num_steps - steps_before < 300


@pytest.mark.parametrize("num", [CONTEXT - 1, CONTEXT])
async def test_up_to_the_whole_context(num: int, served: Served) -> None:
    ids = [i % 200 for i in range(num)]
    assert await served.vectors(input=ids) == [truth(ids)]


async def test_what_cannot_be_is_refused_by_name_before_any_work(served: Served) -> None:
    before = served.runner.num_steps
    for wrong, param in (
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [bytecodec.VOCAB_SIZE]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": None}, "input"),
        ({"input": "a", "dimensions": HIDDEN_SIZE - 1}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate": True}, "truncate"),
        ({"input": "a", "priority": 1001}, "priority"),
    ):
        assert (await served.refused(**wrong))[0] == param, wrong
    too_long = "context_length_exceeded"
    assert await served.refused(input="x" * (CONTEXT + 1)) == ("input", too_long)
    assert await served.refused(input=["x", [1] * (CONTEXT + 1)][1:]) == ("input[0]", too_long)
    assert await served.refused(input=["x", "y" * (CONTEXT + 1)]) == ("input[1]", too_long)
    assert await served.refused(input=["z" * CONTEXT] * 1200) == ("input", "invalid_value")
    assert served.runner.num_steps == before
    assert (await served.post(input="a", model="other"))[0] == 404


async def test_leaving_aborts_all_of_it(served: Served) -> None:
    served.sink.records.clear()
    served.runner.free_to_go.clear()
    try:
        call = asyncio.create_task(served.post(input=[f"text {i}" for i in range(100)]))
        await until(lambda: served.generator.describe()[1].num_waiting > 20)
        call.cancel()
        await until(lambda: bool(served.sink.records))
    finally:
        served.runner.free_to_go.set()
    [event] = served.sink.records
    assert isinstance(event, ReplicaEvent)
    assert (event.finish_reason, event.error_class) == ("abort", "disconnect")
    await until(lambda: not served.generator.describe()[1].num_waiting + served.generator.describe()[1].num_running)
    assert served.generator.describe()[1].kv_blocks_used == 0


async def test_a_full_queue_is_told_and_nothing_stays_behind(native: Native) -> None:
    runner = Runner()
    async with native(runner, max_sequences=2, max_waiting=3) as generator:
        app = build_app(generator, ServeConfig(), ListSink())
        async with serving(app, wait_ready=True) as url:
            http = HttpClient(url)
            served = Served(http, generator, runner, app.state.replica, ListSink())
            texts = [f"text {i}" for i in range(20)]
            for _ in range(5):
                assert len(await served.vectors(input=texts)) == 20, "it waits for its own"
            runner.free_to_go.clear()
            body = json.dumps({"model": "m", "prompt": ["x"] * 5, "max_tokens": 5, "ignore_eos": True}).encode()
            others = asyncio.create_task(http.request("POST", "/v1/completions", body=body))
            await until(lambda: generator.describe()[1].num_waiting + generator.describe()[1].num_running == 5)
            status, answer = await served.post(input=texts)
            assert (status, answer["error"]["code"]) == (503, "overloaded")
            runner.free_to_go.set()
            assert len(json.loads(await (await others).read())["choices"]) == 5
            await until(lambda: not generator.describe()[1].num_waiting + generator.describe()[1].num_running)
            assert await served.vectors(input=texts) == [truth(list(text.encode())) for text in texts]
            await http.close()


async def test_all_that_fail_together_are_one_failure(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's end is the end of every input; none is left for asyncio to complain of."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))

    def broken(_: object) -> StepResult:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(EchoRunner, "wait", broken)
    status, answer = await served.post(input=["one", "two", "three"])
    assert (status, answer["error"]["code"]) == (500, "engine_error")
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


async def test_a_backend_without_hidden_states_says_so(tmp_path: Path) -> None:
    generator = ScriptedGenerator(Script(), model_id="m")
    async with serving(build_app(generator, ServeConfig(), JsonlSink(tmp_path / "e.jsonl"))) as url:
        http = HttpClient(url)
        response = await http.request("POST", "/v1/embeddings", body=b'{"model": "m", "input": "x"}')
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "unsupported_endpoint"
        await http.close()

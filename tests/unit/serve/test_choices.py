"""Several choices in one request: order, counting, failing and leaving together."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from inferloop.backends.http import HttpClient
from inferloop.backends.protocols import Delta, GenerateRequest, Prompt
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.core.errors import OverloadedError
from inferloop.core.ids import TraceContext
from inferloop.core.request import Sampling
from inferloop.records.event import Content, ReplicaEvent
from inferloop.records.sink import Record
from inferloop.serve.app import build_app
from inferloop.serve.choices import choice_sampling, generate_all, spread
from inferloop.serve.config import ServeConfig
from inferloop.serve.replica import Replica
from inferloop.serve.run import serving
from inferloop.serve.wire import Call

TEXT = "one two three"
CHAT = {"messages": [{"role": "user", "content": "x"}]}


class Asked(ScriptedGenerator):
    """Remembers what it was asked."""

    def __init__(self, script: Script) -> None:
        super().__init__(script, model_id="m")
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self.asked.append(request)
        async with contextlib.aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    @property
    def open(self) -> tuple[int, int]:
        """Running, waiting."""
        stats = self.describe()[1]
        return stats.num_running, stats.num_waiting


@dataclass
class ListSink:
    records: list[Record] = field(default_factory=list)

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


@dataclass
class Served:
    client: HttpClient
    generator: Asked
    replica: Replica
    sink: ListSink
    content: ListSink

    async def post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        response = await self.client.request("POST", path, body=json.dumps({"model": "m", **body}).encode())
        return response.status, await response.read()

    async def answer(self, **body: Any) -> dict[str, Any]:
        status, data = await self.post(body)
        assert status == 200, data
        found: dict[str, Any] = json.loads(data)
        return found

    async def event(self) -> ReplicaEvent:
        await until(lambda: bool(self.sink.records))
        [event] = self.sink.records
        assert isinstance(event, ReplicaEvent)
        return event


@contextlib.asynccontextmanager
async def served(script: Script | None = None, **config: Any) -> AsyncIterator[Served]:
    generator = Asked(script or Script(ttft_ms=1, tpot_ms=1, text=TEXT))
    sink, content = ListSink(), ListSink()
    app = build_app(generator, ServeConfig(**config), sink, content_sink=content)
    async with serving(app) as url:
        client = HttpClient(url)
        await until(lambda: app.state.replica.not_ready() is None)  # its own warm-up is not what is counted here
        await until(lambda: generator.open == (0, 0))
        generator.asked.clear()
        try:
            yield Served(client, generator, app.state.replica, sink, content)
        finally:
            await client.close()


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", TraceContext.new(), Prompt(text="x"), Sampling(**sampling), 0)


def test_seeds_differ_and_the_first_is_the_callers() -> None:
    seeds = [choice_sampling(Sampling(seed=7), k).seed for k in range(16)]
    assert seeds[0] == 7 and len(set(seeds)) == 16
    assert all(seed is not None and 0 <= seed < 2**64 for seed in seeds)
    assert seeds == [choice_sampling(Sampling(seed=7), k).seed for k in range(16)]
    # pinned: the same request must give the same texts with every later version
    assert seeds[1] == 17944486369624693846
    assert set(seeds[1:]).isdisjoint(choice_sampling(Sampling(seed=8), k).seed for k in range(16))
    assert choice_sampling(Sampling(), 3).seed is None


def test_choices_are_ordered_by_prompt_then_number() -> None:
    call = Call((Prompt(text="a"), Prompt(text="b")), Sampling(seed=1), False, False, num_per_prompt=2)
    children = spread(call, request(seed=1))
    assert [child.prompt.text for child in children] == ["a", "a", "b", "b"]
    assert children[0].sampling.seed == children[2].sampling.seed == 1
    assert children[1].sampling.seed == children[3].sampling.seed != 1


async def test_the_first_failure_is_raised_and_nothing_is_left() -> None:
    generator, taken = ScriptedGenerator(Script(ttft_ms=1, max_concurrency=2, max_waiting=1), model_id="m"), list[int]()
    with pytest.raises(OverloadedError):
        await generate_all(generator, [request(max_tokens=9)] * 4, lambda *_: taken.append(1))
    assert not taken, "a choice was answered before the refusal of another was told"
    stats = generator.describe()[1]
    assert (stats.num_running, stats.num_waiting) == (0, 0)


async def test_cancelling_ends_running_and_queued_choices() -> None:
    generator = ScriptedGenerator(Script(ttft_ms=1, max_concurrency=2), model_id="m")
    began = asyncio.Event()
    task = asyncio.create_task(generate_all(generator, [request(ignore_eos=True)] * 5, lambda *_: began.set()))
    await began.wait()
    stats = generator.describe()[1]
    assert (stats.num_running, stats.num_waiting) == (2, 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = generator.describe()[1]
    assert (stats.num_running, stats.num_waiting) == (0, 0)


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_streamed_and_whole_have_the_same_choices(kind: str) -> None:
    """Each choice has its own finish, the answer one usage and one [DONE]; a prompt counts once."""
    body = {**CHAT, "n": 3} if kind == "chat" else {"prompt": ["ab", "cde"], "n": 2}
    num = 3 if kind == "chat" else 4
    async with served() as s:
        whole = await s.answer(**body, max_tokens=50)
        [first] = s.sink.records
        status, data = await s.post(
            {**body, "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
        )
        second = s.sink.records[-1]
        prompt_tokens = 5 if kind == "completions" else len(s.generator.render(s.generator.asked[0].prompt))
    *lines, last = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    assert status == 200 and last == "[DONE]" and data.count(b"[DONE]") == 1
    chunks = [json.loads(line) for line in lines]
    assert [i for i, c in enumerate(chunks) if c["usage"]] == [len(chunks) - 1]
    num_output = num * (len(TEXT) + 1)
    for usage in (whole["usage"], chunks[-1]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, num_output)
        assert usage["total_tokens"] == prompt_tokens + num_output
    choices = [c["choices"][0] for c in chunks[:-1]]
    texts, ends = [""] * num, dict[int, str]()
    for choice in choices:
        assert choice["index"] not in ends, "nothing comes after a choice's end"
        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content", "")
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert texts == [TEXT] * num and ends == dict.fromkeys(range(num), "stop")
    middle = [choice["index"] for choice in choices if choice.get("text") or choice.get("delta", {}).get("content")]
    assert middle != sorted(middle), "choices interleave"
    assert [c["index"] for c in whole["choices"]] == list(range(num))
    for choice in whole["choices"]:
        assert (choice["message"]["content"] if kind == "chat" else choice["text"]) == TEXT
        assert choice["finish_reason"] == "stop"
    for event in (first, second):
        assert isinstance(event, ReplicaEvent)
        assert (event.num_input_tokens, event.num_output_tokens) == (prompt_tokens, num_output)
        assert event.token_offsets_us == tuple(sorted(event.token_offsets_us))
        assert len(event.token_offsets_us) == num_output and event.token_offsets_us[0] == 0
        assert event.queue_ms is not None and event.prefill_ms is not None and event.t_first_token_ns is not None
        assert event.queue_ms + event.prefill_ms == pytest.approx((event.t_first_token_ns - event.t_engine_in_ns) / 1e6)


async def test_each_prompt_and_seed_reaches_the_engine() -> None:
    async with served() as s:
        await s.answer(prompt=["a", "bc"], n=2, seed=5, max_tokens=1)
        assert [r.prompt.text for r in s.generator.asked] == ["a", "a", "bc", "bc"]
        seeds = [r.sampling.seed for r in s.generator.asked]
        assert seeds[0] == seeds[2] == 5 and seeds[1] == seeds[3] != 5
        s.generator.asked.clear()
        await s.answer(prompt=[[97], [98]], max_tokens=1)
        assert [r.prompt.token_ids for r in s.generator.asked] == [(97,), (98,)]


@pytest.mark.parametrize("body", [CHAT, {"prompt": "x"}], ids=["chat", "completion"])
async def test_the_priority_reaches_the_engine_with_every_choice(body: dict[str, Any]) -> None:
    async with served() as s:
        await s.answer(**body, n=2, priority=-7, max_tokens=1)
        await s.answer(**body, priority=None, max_tokens=1)
        assert [r.priority for r in s.generator.asked] == [-7, -7, 0]


@pytest.mark.parametrize(
    ("prompt", "echoes"),
    [("hé", ["hé"]), (["a", "b"], ["a", "b"]), ([104, 105], ["hi"]), ([[104], [105]], ["h", "i"])],
)
async def test_echo_begins_each_choice_with_its_prompt(prompt: Any, echoes: list[str]) -> None:
    body = {"prompt": prompt, "echo": True, "n": 2, "max_tokens": 3}
    expected = [echo + TEXT[:3] for echo in echoes for _ in range(2)]
    async with served() as s:
        whole = await s.answer(**body)
        _, data = await s.post({**body, "stream": True})
    assert [c["text"] for c in whole["choices"]] == expected
    assert whole["usage"]["completion_tokens"] == 3 * len(expected), "the echo is no output"
    texts = [""] * len(expected)
    for line in data.decode().split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected


async def test_metrics_count_requests_and_agree() -> None:
    async with served() as s:
        for _ in range(3):
            await s.answer(prompt=["ab", "cde"], n=2, max_tokens=5)
        metrics = s.replica.metrics
    assert metrics.finished == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    assert metrics.histograms["ttft"].count + metrics.num_without_token == 3
    for key in ("e2e", "decode", "tpot", "prompt", "generation", "queue", "prefill"):
        assert metrics.histograms[key].count == 3, key
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (3 * 5, 3 * 20)
    assert metrics.histograms["itl"].count == 3 * 4 * 4  # all but the first of each choice
    # a choice's pace, not that of all of them together
    assert metrics.histograms["tpot"].sum / 3 == pytest.approx(metrics.histograms["itl"].sum / 48)


async def test_a_choice_refused_at_admission_refuses_the_request() -> None:
    async with served(Script(ttft_ms=1, tpot_ms=1, text=TEXT, max_concurrency=2, max_waiting=1)) as s:
        for num, stream in enumerate((False, True), 1):
            status, data = await s.post({**CHAT, "n": 4, "stream": stream})
            assert (status, json.loads(data)["error"]["code"]) == (503, "overloaded")
            assert s.generator.open == (0, 0)
            assert len(s.sink.records) == num == s.replica.metrics.refused["overloaded"]
        assert sum(s.replica.metrics.finished.values()) == 0
        assert len((await s.answer(**CHAT, n=3))["choices"]) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_choice_that_fails_ends_the_request_once(stream: bool) -> None:
    async with served(Script(ttft_ms=1, tpot_ms=1, text=TEXT)) as s:
        s.generator.script = Script(ttft_ms=1, tpot_ms=1, text=TEXT, error_rate=1.0, error_after_tokens=2)
        status, data = await s.post({**CHAT, "n": 3, "stream": stream})
        event = await s.event()
        assert status == (200 if stream else 500) == event.status
        assert data.count(b'"error":{') == 1 and b"[DONE]" not in data
        assert (event.finish_reason, event.error_class) == ("error", "engine")
        assert s.generator.open == (0, 0)
        assert s.replica.metrics.finished["error"] == 1 == s.replica.metrics.histograms["ttft"].count


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_ends_all_choices_queued_ones_too(stream: bool) -> None:
    async with served(Script(ttft_ms=1, tpot_ms=2, text=TEXT, max_concurrency=2)) as s:
        body = json.dumps(
            {"model": "m", "prompt": "x", "n": 4, "stream": stream, "ignore_eos": True, "max_tokens": 30_000}
        )
        call = asyncio.create_task(s.client.request("POST", "/v1/completions", body=body.encode()))
        await until(lambda: s.generator.open == (2, 2) and call.done() == stream)
        if call.done():
            call.result().abort()
        call.cancel()
        event = await s.event()
        await until(lambda: s.generator.open == (0, 0))
        assert (event.finish_reason, event.error_class) == ("abort", "disconnect")
        assert s.replica.attempts == {} and s.replica.metrics.finished["abort"] == 1


async def test_content_has_one_row_for_each_choice(tmp_path: Path) -> None:
    async with served(capture="text", content_path=tmp_path / "c.jsonl") as s:
        await s.answer(prompt=["ab", "c"], n=2, max_tokens=3)
        event = await s.event()
    rows = [row for row in s.content.records if isinstance(row, Content)]
    assert [(row.choice, row.input_text, row.output_text) for row in rows] == [
        (0, "ab", "one"), (1, "ab", "one"), (2, "c", "one"), (3, "c", "one"),
    ]  # fmt: skip
    assert {row.event_id for row in rows} == {event.event_id}

"""/v1/responses over HTTP: every byte is what the openai package's own types allow, whole and as events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.waiting import until

from inferloop.backends.http import HttpClient
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.engine.text.answer import AnswerStyle
from inferloop.records.event import ReplicaEvent
from inferloop.records.sink import Record
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.replica import Replica
from inferloop.serve.run import serving

TEXT = "Größe 世界 👩‍👩‍👧 and the end"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BEFORE = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
AFTER = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
DELTA = "response.output_text.delta"


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
    replica: Replica
    sink: ListSink

    async def post(self, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, bytes]:
        body = json.dumps({"model": "m", "input": "hi", **fields}).encode()
        answer = await self.client.request("POST", "/v1/responses", body=body, headers=(headers or {}).items())
        return answer.status, await answer.read()

    async def whole(self, **fields: Any) -> dict[str, Any]:
        status, data = await self.post(**fields)
        assert status == 200, data
        return checked(json.loads(data))

    async def stream(self, **fields: Any) -> list[dict[str, Any]]:
        status, data = await self.post(**fields, stream=True)
        assert status == 200, data
        return events_of(data)

    async def event(self) -> ReplicaEvent:
        await until(lambda: bool(self.sink.records))
        [event] = self.sink.records
        assert isinstance(event, ReplicaEvent)
        return event


@contextlib.asynccontextmanager
async def served(
    script: Script | None = None, style: AnswerStyle | None = None, **config: Any
) -> AsyncIterator[Served]:
    sink = ListSink()
    script = script or Script(ttft_ms=1, tpot_ms=0, text=TEXT)
    generator = ScriptedGenerator(script, model_id="m", answer_style=style)
    app = build_app(generator, ServeConfig(**config), sink)
    async with serving(app) as url:
        client = HttpClient(url)
        try:
            yield Served(client, app.state.replica, sink)
        finally:
            await client.close()


def checked(response: dict[str, Any]) -> dict[str, Any]:
    Response.model_validate(response)
    return response


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream; each one is what the package's types allow, and numbered."""
    frames = data.decode().split("\n\n")
    assert frames.pop() == ""
    events = []
    for number, frame in enumerate(frames):
        kind, _, rest = frame.partition("\n")
        event = json.loads(rest.removeprefix("data: "))
        assert kind == f"event: {event['type']}" and event["sequence_number"] == number
        EVENTS.validate_python(event)
        events.append(event)
    return events


def lasting(response: dict[str, Any]) -> dict[str, Any]:
    """Without what no two answers share."""
    output = [{**item, "id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "output": output}


async def test_a_whole_answer() -> None:
    async with served() as s:
        told = await s.whole(instructions="Be brief.", metadata={"a": "b"}, user="u", temperature=0.5, top_p=0.9)
        event = await s.event()
    assert told["id"].startswith("resp_") and told["output"][0]["id"].startswith("msg_")
    assert (told["object"], told["status"], told["model"]) == ("response", "completed", "m")
    part = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    assert [(item["type"], item["status"], item["content"]) for item in told["output"]] == [
        ("message", "completed", [part])
    ]
    assert (told["incomplete_details"], told["error"], told["store"], told["background"]) == (None, None, False, False)
    assert (told["instructions"], told["metadata"], told["user"]) == ("Be brief.", {"a": "b"}, "u")
    assert (told["temperature"], told["top_p"], told["max_output_tokens"]) == (0.5, 0.9, None)
    usage = told["usage"]
    assert usage["input_tokens"] == event.num_input_tokens > 0
    assert usage["output_tokens"] == event.num_output_tokens == len(TEXT.encode()) + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["output_tokens_details"]["reasoning_tokens"] == 0
    assert (event.finish_reason, event.status) == ("stop", 200)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
@pytest.mark.parametrize("limit", [None, 7])
async def test_the_stream_is_the_whole_answer_in_pieces(tokens_per_chunk: int, limit: int | None) -> None:
    """Cut at every byte, characters of several bytes too."""
    script = Script(ttft_ms=1, tpot_ms=0, tokens_per_chunk=tokens_per_chunk, text=TEXT)
    async with served(script) as s:
        whole = await s.whole(max_output_tokens=limit)
        events = await s.stream(max_output_tokens=limit)
    text = whole["output"][0]["content"][0]["text"]
    assert text == (TEXT if limit is None else TEXT.encode()[:7].decode())
    kinds = [event["type"] for event in events]
    num_deltas = kinds.count(DELTA)
    assert num_deltas > 1 or tokens_per_chunk == 100
    end = "response.completed" if limit is None else "response.incomplete"
    assert kinds == [*BEFORE, *[DELTA] * num_deltas, *AFTER, end]
    assert "".join(event["delta"] for event in events if event["type"] == DELTA) == text
    assert events[-4]["text"] == events[-3]["part"]["text"] == text
    assert events[-2]["item"] == events[-1]["response"]["output"][0]
    assert lasting(checked(events[-1]["response"])) == lasting(whole)
    begun = events[0]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert begun["id"] == events[-1]["response"]["id"]
    item_id = events[2]["item"]["id"]
    assert all(event["item_id"] == item_id for event in events if "item_id" in event)
    assert events[-2]["item"]["id"] == item_id


async def test_an_answer_cut_by_its_limit_is_incomplete() -> None:
    async with served() as s:
        told = await s.whole(max_output_tokens=2)
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (told["output"][0]["status"], told["usage"]["output_tokens"]) == ("incomplete", 2)


async def test_an_answer_without_text_still_has_its_message() -> None:
    async with served() as s:
        fields: dict[str, Any] = {"stop": TEXT[0]}
        whole, events = await s.whole(**fields), await s.stream(**fields)
    assert whole["output"][0]["content"][0]["text"] == ""
    assert [event["type"] for event in events] == [*BEFORE, *AFTER, "response.completed"]
    assert lasting(events[-1]["response"]) == lasting(whole)


async def test_logprobs_only_where_they_are_included() -> None:
    ask: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 6}
    async with served() as s:
        whole, events, plain = await s.whole(**ask), await s.stream(**ask), await s.whole()
    rows = whole["output"][0]["content"][0]["logprobs"]
    assert bytes(byte for row in rows for byte in row["bytes"]) == TEXT.encode()[:6]
    assert all(row["logprob"] == 0 and len(row["top_logprobs"]) == 1 for row in rows)
    assert [row for event in events if event["type"] == DELTA for row in event["logprobs"]] == rows
    assert events[-4]["logprobs"] == rows and whole["top_logprobs"] == 1
    assert plain["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("after", [0, 4])
async def test_a_failure_is_an_error_before_the_first_token_and_an_event_after_it(after: int) -> None:
    script = Script(ttft_ms=1, tpot_ms=0, error_rate=1.0, error_after_tokens=after, text=TEXT)
    async with served(script) as s:
        status, data = await s.post(stream=True)
        event = await s.event()
    assert (event.finish_reason, event.error_class, event.num_output_tokens) == ("error", "engine", after)
    if after == 0:
        assert (status, json.loads(data)["error"]["code"]) == (500, "engine_error")
        return
    *_, last = events_of(data)
    assert (status, last["type"]) == (200, "response.failed")
    failed = checked(last["response"])
    assert (failed["status"], failed["error"]["code"], failed["usage"]) == ("failed", "server_error", None)
    assert failed["output"][0]["status"] == "incomplete"
    assert failed["output"][0]["content"][0]["text"] == TEXT.encode()[:4].decode(errors="ignore")


async def test_a_drained_stream_ends_as_failed() -> None:
    async with served(Script(ttft_ms=1, tpot_ms=2, text=TEXT), drain_timeout_s=0) as s:
        asked = asyncio.create_task(s.post(stream=True, ignore_eos=True))
        await until(lambda: s.replica.metrics.generation_tokens >= 3)
        await s.replica.drain()
        _, data = await asked
    last = events_of(data)[-1]
    assert last["type"] == "response.failed" and "shut down" in last["response"]["error"]["message"]


async def test_timings_on_request() -> None:
    headers = {"x-inferloop-timings": "1"}
    async with served() as s:
        _, whole = await s.post(headers)
        _, data = await s.post(headers, stream=True)
    timings = json.loads(whole)["inferloop"]
    assert timings["num_tokens"] == len(TEXT.encode()) + 1 and timings["queue_ms"] >= 0
    events = events_of(data)
    last = events[-1]["response"]["inferloop"]
    counted = sum(event["inferloop"]["num_tokens"] for event in events if event["type"] == DELTA)
    assert counted + last["num_tokens"] == timings["num_tokens"] and last["decode_ms"] >= 0


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_ends_the_work(stream: bool) -> None:
    async with served(Script(ttft_ms=1, tpot_ms=5)) as s:
        body = json.dumps({"model": "m", "input": "x", "stream": stream, "ignore_eos": True}).encode()
        asked = asyncio.create_task(s.client.request("POST", "/v1/responses", body=body))
        await until(lambda: s.replica.metrics.generation_tokens >= 3)
        if stream:
            (await asked).abort()
        asked.cancel()
        event = await s.event()
        assert (event.finish_reason, event.error_class) == ("abort", "disconnect")
        assert s.replica.attempts == {}


TOOL = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": True}
ONE = '<tool_call>\n{"name": "now", "arguments": {"zone": "Zürich"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALLS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "text and a call": (f"Let me see. {ONE}", [("message", "Let me see."), ("function_call", '{"zone": "Zürich"}')]),
    "two calls": (f"{ONE}\n{TWO}", [("function_call", '{"zone": "Zürich"}'), ("function_call", "{}")]),
    "thought and text": (f"<think>hm\n</think>{TEXT}", [("reasoning", "hm"), ("message", TEXT)]),
    "thought and a call": (f"<think>hm</think>{TWO}", [("reasoning", "hm"), ("function_call", "{}")]),
    "only thought": ("<think>hm", [("reasoning", "hm")]),
    "text": (TEXT, [("message", TEXT)]),
}


def told_by(item: dict[str, Any]) -> tuple[str, str]:
    kind = item["type"]
    text = item["arguments"] if kind == "function_call" else "".join(part["text"] for part in item["content"])
    return kind, text.strip()


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", CALLS)
async def test_calls_and_reasoning_are_items_of_their_own(name: str, tokens_per_chunk: int) -> None:
    text, expected = CALLS[name]
    script = Script(ttft_ms=1, tpot_ms=0, tokens_per_chunk=tokens_per_chunk, text=text)
    async with served(script, AnswerStyle("hermes", thinks=True)) as s:
        whole = await s.whole(tools=[TOOL])
        events = await s.stream(tools=[TOOL])
    assert [told_by(item) for item in whole["output"]] == expected
    assert whole["tools"] == [{**TOOL, "description": None}] and whole["tool_choice"] == "auto"
    ids = {item["id"].partition("_")[0] for item in whole["output"]}
    assert ids <= {"msg", "fc", "rs"}
    final = events[-1]["response"]
    without = [
        [{**item, "id": "", **({"call_id": ""} if "call_id" in item else {})} for item in told["output"]]
        for told in (whole, final)
    ]
    assert without[0] == without[1] and final["usage"] == whole["usage"]
    num = len(final["output"])
    for index, item in enumerate(final["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added" and mine[-1]["type"] == "response.output_item.done"
        assert mine[0]["item"]["status"] == "in_progress" and mine[-1]["item"] == item
        deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
    assert sorted({event["output_index"] for event in events if "output_index" in event}) == list(range(num))
    reasoning = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    if expected[0][0] != "reasoning":
        assert reasoning == 0
    elif tokens_per_chunk == 1 and len(expected) > 1:
        assert reasoning == len(text[: text.index("</think>") + 8].encode())


@pytest.mark.parametrize("opened", [True, False])
async def test_logprobs_are_those_of_the_messages_text(opened: bool) -> None:
    thought, parts = "hm, why?\n</think>\n", ["< A", "B ü", "<x"]
    text = ("" if opened else "<think>") + thought + f"{parts[0]}\n{ONE}{parts[1]}{TWO}{parts[2]}"
    script = Script(ttft_ms=1, tpot_ms=0, text=text)
    ask: dict[str, Any] = {"include": ["message.output_text.logprobs"], "tools": [TOOL]}
    async with served(script, AnswerStyle("hermes", thinks=True, think_opened=opened)) as s:
        whole, events = await s.whole(**ask), await s.stream(**ask)
    for output in (whole["output"], events[-1]["response"]["output"]):
        messages = [item["content"][0] for item in output if item["type"] == "message"]
        assert [message["text"] for message in messages] == parts
        for message in messages:
            assert bytes(byte for row in message["logprobs"] for byte in row["bytes"]) == message["text"].encode()


async def test_a_call_is_only_told_when_it_is_complete() -> None:
    async with served(Script(ttft_ms=1, tpot_ms=0, text=ONE)) as s:
        for limit in (5, 30, ONE.index("Z")):
            cut = await s.whole(tools=[TOOL], max_output_tokens=limit)
            assert cut["status"] == "incomplete" and "function_call" not in [item["type"] for item in cut["output"]]
            events = await s.stream(tools=[TOOL], max_output_tokens=limit)
            assert lasting(events[-1]["response"])["output"] == lasting(cut)["output"]
        told = await s.whole(tools=[TOOL], tool_choice="none")
        assert told_by(told["output"][0]) == ("message", ONE)


async def test_errors_of_the_engine_name_the_fields_of_this_endpoint() -> None:
    async with served(Script(context_length=60)) as s:
        for fields in (
            {"input": "x" * 100},
            {"max_output_tokens": 100},
            {"input": [{"role": "user", "content": "x"}] * 70},
        ):
            status, data = await s.post(**fields)
            error = json.loads(data)["error"]
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")


async def test_nothing_is_kept() -> None:
    async with served() as s:
        told = await s.whole()
        answer = await s.client.request("GET", f"/v1/responses/{told['id']}")
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")

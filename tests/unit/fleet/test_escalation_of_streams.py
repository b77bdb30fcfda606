"""Streams of a service with several models: nobody sees half of one answer and then another."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.unit.fleet.gateways import RESPONSES, Desk
from tests.unit.fleet.models import BROKEN, GOOD, JSON, chunks, content, says, usage
from tests.unit.fleet.stubs import Asked, Handler, Talk


@pytest.mark.parametrize("asks_usage", [False, True])
async def test_a_stream_shows_nothing_of_the_answer_that_failed(desk: Desk, asks_usage: bool) -> None:
    await desk.open(cheap=says(BROKEN), strong=says(GOOD, counts=usage(100, 20)))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asks_usage else {}
    response = await desk.post(stream=True, **JSON, **options)
    assert response.header("content-type") == "text/event-stream" and response.header("x-inferloop-hops") == "2"
    text = await response.read()
    assert content(text) == GOOD and text.endswith(b"data: [DONE]\n\n")
    assert (b"usage" in text) is asks_usage
    event = await desk.event()
    assert [hop.num_output_tokens for hop in event.hops] == [10, 20], "counted also where nobody asked to see it"


async def test_the_last_model_streams_as_it_answers(desk: Desk) -> None:
    gate = asyncio.Event()

    async def slow(asked: Asked, talk: Talk) -> None:
        await talk.sse('{"choices":[{"index":0,"delta":{"content":"{"}}]}')
        await gate.wait()
        await talk.event("[DONE]")
        await talk.end()

    await desk.open(cheap=says(BROKEN), strong=slow)
    pieces = (await desk.post(stream=True, **JSON)).pieces()
    assert b'"content":"{"' in (await anext(pieces))[1]
    gate.set()
    assert [data async for _, data in pieces] == [b"data: [DONE]\n\n"]


@pytest.mark.parametrize("asks_usage", [False, True])
async def test_a_held_stream_that_holds_is_the_answer_to_the_letter(desk: Desk, asks_usage: bool) -> None:
    await desk.open(cheap=says(GOOD), strong=says(GOOD))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asks_usage else {}
    text = await (await desk.post(stream=True, **JSON, **options)).read()
    assert content(text) == GOOD and text.endswith(b"data: [DONE]\n\n")
    assert [frame["usage"] for frame in chunks(text) if frame.get("usage")] == (
        [usage(100, 10, 40)] if asks_usage else []
    )
    assert (b"usage" in text) is asks_usage


async def test_what_no_check_can_look_at_streams_at_once(desk: Desk) -> None:
    gate = asyncio.Event()

    async def slow(asked: Asked, talk: Talk) -> None:
        await talk.sse('{"choices":[{"index":0,"delta":{"content":"Hi"}}],"usage":null}')
        await gate.wait()
        await talk.end()

    await desk.open(cheap=slow, strong=says(GOOD))
    pieces = (await desk.post(stream=True)).pieces()
    assert (await anext(pieces))[1] == b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
    gate.set()
    assert [data async for _, data in pieces] == []


async def test_a_stream_of_responses_is_held_and_escalated(desk: Desk) -> None:
    def stream_of(text: str) -> Handler:
        async def handle(asked: Asked, talk: Talk) -> None:
            output = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
            answer = {"output": output, "usage": {"input_tokens": 5, "output_tokens": 2}}
            await talk.sse()
            for kind, body in (("response.created", {"output": []}), ("response.completed", answer)):
                data = json.dumps({"type": kind, "response": body}, separators=(",", ":"))
                await talk.chunk(f"event: {kind}\ndata: {data}\n\n".encode())
            await talk.end()

        return handle

    await desk.open(cheap=stream_of(BROKEN), strong=stream_of(GOOD))
    response = await desk.post(RESPONSES, stream=True, input="?", text={"format": {"type": "json_object"}})
    text = await response.read()
    assert text.count(b"event: response.completed") == 1 and json.dumps(GOOD).encode() in text
    assert "stream_options" not in desk.sent("cheap"), "their usage comes by itself"
    assert [hop.num_output_tokens for hop in (await desk.event()).hops] == [2, 2]


async def test_a_held_stream_of_responses_that_ends_too_early_is_no_answer(desk: Desk) -> None:
    async def stops(asked: Asked, talk: Talk) -> None:
        await talk.sse('{"type":"response.created","response":{"output":[]}}')
        await talk.event('{"type":"response.output_text.delta","delta":"secret"}')
        await talk.end()

    await desk.open(cheap=stops, strong=says(GOOD))
    response = await desk.post(RESPONSES, stream=True, input="?", text={"format": {"type": "json_object"}})
    assert (response.status, b"secret" in await response.read()) == (502, False)


@pytest.mark.parametrize("ending", ["cut", "error", "early"])
async def test_a_held_stream_that_breaks_is_an_error_and_no_half_answer(desk: Desk, ending: str) -> None:
    async def breaks(asked: Asked, talk: Talk) -> None:
        await talk.sse('{"choices":[{"index":0,"delta":{"content":"secret"}}]}')
        if ending == "cut":
            talk.cut()
            return
        if ending == "error":
            await talk.event('{"error":{"message":"the engine failed"}}')
        await talk.end()

    await desk.open(cheap=breaks, strong=says(GOOD))
    response = await desk.post(stream=True, **JSON)
    text = await response.read()
    assert response.status == 502 and json.loads(text)["error"]["code"] == "replica_failed" and b"secret" not in text
    event = await desk.event()
    assert (event.status, event.error_class, len(event.hops)) == (502, "truncated", 1)


async def test_the_last_models_stream_that_breaks_ends_with_an_error_event(desk: Desk) -> None:
    async def breaks(asked: Asked, talk: Talk) -> None:
        await talk.sse('{"choices":[{"index":0,"delta":{"content":"{"}}]}')
        talk.cut()

    await desk.open(cheap=says(BROKEN), strong=breaks)
    text = await (await desk.post(stream=True, **JSON)).read()
    assert content(text) == "{" and chunks(text)[-1]["error"]["code"] == "replica_failed"
    event = await desk.event()
    assert (event.error_class, event.hops[1].error_class, event.hops[1].delivered) == ("truncated", "truncated", True)

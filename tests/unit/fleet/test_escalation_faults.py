"""Models that fail, are slow or are not there, and callers who leave, while an answer is escalated."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.unit.fleet.gateways import NO_RETRIES, Desk, escalating
from tests.unit.fleet.models import BROKEN, GOOD, JSON, content, refuses, said, says
from tests.unit.fleet.stubs import Asked, Handler, Talk, answers, dies, never
from tests.waiting import until

from inferloop.fleet.decide.routes import HANDOVER_S


@pytest.mark.parametrize(
    ("strong", "missed"),
    [(refuses(500), "http_5xx"), (refuses(400), "http_400"), (dies, "truncated"), (None, "no_replica_ready")],
)
async def test_when_the_strong_model_fails_the_cheap_answer_is_delivered_and_says_so(
    desk: Desk, strong: Handler | None, missed: str
) -> None:
    models: dict[str, Any] = {"cheap": says(BROKEN)} | ({"strong": strong} if strong else {})
    await desk.open(**models)
    response = await desk.post(**JSON)
    assert (await response.json())["choices"][0]["message"]["content"] == BROKEN
    assert response.status == 200 and response.header("x-inferloop-model") == "cheap"
    assert response.header("x-inferloop-hops") == "2"
    assert response.header("x-inferloop-failed-checks") == "invalid_json"
    told = response.header("x-inferloop-escalation-missed")
    assert told == ("http_500" if missed == "http_5xx" else missed)
    event = await desk.event()
    assert (event.status, event.model, event.error_class, event.escalation_missed) == (200, "cheap", None, told)
    assert [hop.delivered for hop in event.hops] == [True, False] and event.hops[1].error_class is not None
    assert event.cost_usd == event.hops[0].cost_usd and event.hops[1].cost_usd is None


@pytest.mark.parametrize(("cheap", "status"), [(refuses(500), 500), (refuses(400), 400), (dies, 502)])
async def test_a_first_hop_without_an_answer_stays_what_it_was(desk: Desk, cheap: Handler, status: int) -> None:
    await desk.open(cheap=cheap, strong=says(GOOD), budget=NO_RETRIES)
    assert (await desk.post(**JSON)).status == status
    event = await desk.event()
    assert len(event.hops) == 1 and not desk.stubs["strong"].asked and event.error_class is not None


async def test_unavailable_asks_the_next_model_and_both_may_be(desk: Desk) -> None:
    await desk.open(routing=escalating(unavailable=True), cheap=dies, strong=says("Yes."), budget=NO_RETRIES)
    response = await desk.post(stream=True)
    assert content(await response.read()) == "Yes."
    assert response.header("x-inferloop-failed-checks") == "unavailable"
    assert [hop.status for hop in (await desk.event()).hops] == [None, 200]

    desk.stubs["strong"].handle = refuses(503)
    response = await desk.post()
    assert response.status == 503 and response.header("x-inferloop-hops") == "2"
    event = await desk.event()
    assert [hop.error_class for hop in event.hops] == ["truncated", "http_5xx"] and event.error_class == "http_5xx"
    assert event.cost_usd is None, "not known is not zero"

    desk.stubs["cheap"].handle = refuses(400)
    assert (await desk.post()).status == 400, "what the caller did wrong is wrong everywhere"


async def test_a_fault_is_retried_on_a_replica_of_the_same_model(desk: Desk) -> None:
    await desk.open(cheap=dies, strong=says("strong"))
    await desk.add("cheap-r1", says(GOOD), "cheap")
    for _ in range(4):
        desk.router.set_ready("cheap-r1", True)
        assert (await (await desk.post(**JSON)).json())["choices"][0]["message"]["content"] == GOOD
        event = await desk.event()
        assert [hop.model for hop in event.hops] == ["cheap"] and event.num_retries == event.hops[0].num_retries
    assert not desk.stubs["strong"].asked


async def test_no_time_left_delivers_the_answer_in_hand(desk: Desk) -> None:
    await desk.open(cheap=says(BROKEN, before=desk.taking(60_000)), strong=says(GOOD))
    response = await desk.post(headers={"x-request-timeout-ms": "60000"}, **JSON)
    assert (await response.json())["choices"][0]["message"]["content"] == BROKEN
    assert response.header("x-inferloop-escalation-missed") == "deadline" and not desk.stubs["strong"].asked
    event = await desk.event()
    assert (event.escalation_missed, len(event.hops), event.hops[0].delivered) == ("deadline", 1, True)

    response = await desk.post(headers={"x-request-timeout-ms": "90000"}, **JSON)
    assert (await response.json())["choices"][0]["message"]["content"] == GOOD
    assert desk.stubs["cheap"].asked[-1].headers["x-request-timeout-ms"] == "90000"
    left_ms = desk.stubs["strong"].asked[-1].headers["x-request-timeout-ms"]
    assert left_ms == str(round(30_000 - HANDOVER_S * 1000)), "what the first has left of it"


async def test_a_strong_model_that_is_too_slow_leaves_the_cheap_answer(desk: Desk) -> None:
    await desk.open(cheap=says(BROKEN, before=desk.taking(59_700)), strong=never)
    response = await desk.post(headers={"x-request-timeout-ms": "60000"}, **JSON)
    assert (await response.json())["choices"][0]["message"]["content"] == BROKEN
    assert response.header("x-inferloop-escalation-missed") == "timeout"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("silent", ["cheap", "strong"])
async def test_a_caller_who_leaves_cancels_the_hop_in_flight(desk: Desk, silent: str, stream: bool) -> None:
    closed = asyncio.Event()

    async def works(asked: Asked, talk: Talk) -> None:
        if stream:
            await talk.sse('{"choices":[]}')
        await talk.until_closed()
        closed.set()

    models: dict[str, Any] = {"cheap": says(BROKEN), "strong": says(GOOD), silent: works}
    await desk.open(**models)
    asking = asyncio.create_task(desk.post(stream=stream, **JSON))
    await until(lambda: desk.stubs[silent].num_active > 0)
    if stream and silent == "strong":
        (await asking).abort()
    else:
        asking.cancel()
    await until(closed.is_set)
    event = await desk.event()
    assert event.error_class == "disconnect" and [hop.model for hop in event.hops][-1] == silent
    assert len(desk.stubs["strong"].asked) == (silent == "strong"), "nobody else is asked for who has left"
    assert desk.router.num_in_flight == 0
    assert event.cost_usd == (event.hops[0].cost_usd if silent == "strong" else None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_strong_model_that_begins_and_then_is_silent_leaves_the_cheap_answer(desk: Desk, stream: bool) -> None:
    """Its headers alone are no answer within the deadline."""

    async def begins(asked: Asked, talk: Talk) -> None:
        kind = b"text/event-stream" if stream else b"application/json"
        await talk.raw(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: 99\r\n\r\n" % kind)
        await talk.until_closed()

    await desk.open(cheap=says(BROKEN, before=desk.taking(59_700)), strong=begins)
    response = await desk.post(headers={"x-request-timeout-ms": "60000"}, stream=stream, **JSON)
    assert said(await response.read()) == BROKEN and response.header("x-inferloop-escalation-missed") == "timeout"
    assert [hop.error_class for hop in (await desk.event()).hops] == [None, "timeout"]
    assert not desk.faults, "how short the deadline was is no fault of the replica"


async def test_a_held_stream_has_the_deadline_that_its_request_has(desk: Desk) -> None:
    async def trickles(asked: Asked, talk: Talk) -> None:
        await talk.sse('{"choices":[{"index":0,"delta":{"content":"{"}}]}')
        await talk.until_closed()

    await desk.open(cheap=trickles, strong=says(GOOD))
    response = await desk.post(headers={"x-request-timeout-ms": "300"}, stream=True, **JSON)
    assert (response.status, (await desk.event()).error_class) == (504, "timeout")


@pytest.mark.parametrize("asked_for", [{"stream": True}, {}])
async def test_who_cancels_does_not_ask_the_next_model(desk: Desk, asked_for: dict[str, Any]) -> None:
    """As replicas tell of it, also where a model that is unavailable would be replaced."""
    told = {"error": {"message": "the request was cancelled", "type": "request_ended_error", "code": "cancelled"}}

    async def cancelled(asked: Asked, talk: Talk) -> None:
        if not asked_for:
            await talk.json(499, json.dumps(told).encode())
            return
        await talk.sse('{"choices":[{"index":0,"delta":{"content":"{"}}]}', json.dumps(told))
        await talk.end()

    await desk.open(routing=escalating(unavailable=True), cheap=cancelled, strong=says(GOOD))
    response = await desk.post(**asked_for, **JSON)
    assert (response.status, await response.json()) == (499, told) and not desk.stubs["strong"].asked
    assert (await desk.event()).error_class == "http_4xx"
    desk.stubs["cheap"].handle, desk.stubs["strong"].handle = says(BROKEN), cancelled
    response = await desk.post(**asked_for, **JSON)
    assert asked_for or response.status == 499, "with an answer in hand that nobody wants any more"
    assert b"cancelled" in await response.read()


async def test_a_429_is_the_callers_and_keeps_its_retry_after(desk: Desk) -> None:
    await desk.open(
        routing=escalating(unavailable=True), cheap=answers(429, b"{}", "retry-after: 7"), strong=says(GOOD)
    )
    response = await desk.post(**JSON)
    assert (response.status, response.header("retry-after")) == (429, "7") and not desk.stubs["strong"].asked
    desk.stubs["cheap"].handle, desk.stubs["strong"].handle = says(BROKEN), desk.stubs["cheap"].handle
    response = await desk.post(**JSON)
    assert (response.status, response.header("x-inferloop-escalation-missed")) == (200, "http_429")
    assert response.header("retry-after") is None

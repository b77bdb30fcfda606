"""Replicas that fail, are slow or go, and callers who leave: what is retried, and what becomes of the answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from openai.types.responses import ResponseErrorEvent
from tests.unit.fleet.gateways import Front
from tests.unit.fleet.stubs import Asked, Handler, Talk, answers, dies, ok
from tests.waiting import until

from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.decide.retry import BudgetConfig


async def test_a_stream_that_breaks_ends_with_an_error_event_and_no_half_event(front: Front) -> None:
    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.sse("1", "2")
        await talk.chunk(b'data: {"cut in the mid')
        talk.cut()

    await front.open(handle, handle)
    text = await (await front.post()).read()
    head, error = text[: len("data: 1\n\ndata: 2\n\n")], text[len("data: 1\n\ndata: 2\n\n") :]
    assert head == b"data: 1\n\ndata: 2\n\n"
    assert error.startswith(b"data: ") and error.endswith(b"\n\n")
    assert json.loads(error[6:])["error"]["code"] == "replica_failed"
    event = await front.event()
    assert (event.status, event.error_class, event.num_retries) == (200, "truncated", 0)
    assert sum(len(stub.asked) for stub in front.stubs) == 1, "no retry after the first byte"
    assert [fault[0] for fault in front.faults] == [event.replica]
    assert await front.metric("inferloop_gateway_broken_streams_total") == 1


@pytest.mark.parametrize("code", ["replica_failed", "stopping"])
async def test_a_broken_stream_of_responses_ends_with_a_typed_and_numbered_error(front: Front, code: str) -> None:
    three = b"".join(b'event: e\ndata: {"type":"e","sequence_number":%d}\n\n' % number for number in range(3))

    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.sse()
        await talk.chunk(three[:60])
        await talk.chunk(three[60:] + b"event: half an ev")
        if code == "stopping":
            await talk.until_closed()
        talk.cut()

    await front.open(handle)
    pieces = (await front.post(path="/v1/responses")).pieces()
    text = b""
    while not text.startswith(three):
        text += (await anext(pieces))[1]
    if code == "stopping":
        await front.server.stop(0)
    text += b"".join([data async for _, data in pieces])
    kind, _, data = text.removeprefix(three).partition(b"\ndata: ")
    told = json.loads(data)
    event = ResponseErrorEvent.model_validate(told)
    assert (kind, event.type, event.sequence_number, event.code) == (b"event: error", "error", 3, code)
    assert told["error"]["code"] == code, "by which the openai package knows to raise"


async def test_an_answer_that_breaks_is_a_502_error_object(front: Front) -> None:
    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        talk.cut()

    await front.open(handle, handle)
    response = await front.post()
    assert response.status == 502
    assert (await response.json())["error"]["type"] == "server_error"
    assert sum(len(stub.asked) for stub in front.stubs) == 1, "the work had been done: not done twice"


async def dies_before_its_first_token(asked: Asked, talk: Talk) -> None:
    await talk.sse()
    talk.cut()


@pytest.mark.parametrize(
    "broken", [dies, dies_before_its_first_token, answers(500), answers(503, b"{}", "retry-after: 9")]
)
async def test_before_the_first_byte_another_replica_takes_over_once(front: Front, broken: Handler) -> None:
    await front.open(broken, ok)
    with front.busy("r1"):
        response = await front.post(b"same")
        assert (response.status, await response.read()) == (200, b'{"ok": true}')
    assert [stub.asked[0].body for stub in front.stubs] == [b"same", b"same"]
    event = await front.event()
    assert (event.replica, event.num_retries, event.error_class) == ("r1", 1, None)
    assert await front.metric("inferloop_gateway_retries_total") == 1


async def test_a_replica_that_refuses_connections_is_replaced_and_told_on(front: Front) -> None:
    await front.open(ok, ok)
    await front.stubs[0].close()
    with front.busy("r1"):
        assert (await front.post()).status == 200
    assert [replica_id for replica_id, _ in front.faults] == ["r0"]


async def test_nobody_to_be_reached_is_503_to_be_tried_again(front: Front) -> None:
    await front.open(ok)
    await front.stubs[0].close()
    response = await front.post()
    assert (response.status, response.header("retry-after")) == (503, "1")
    assert (await response.json())["error"]["code"] == "replica_unreachable"
    assert (await front.event()).error_class == "connect"


async def test_two_faults_are_enough_the_last_answer_is_passed_on(front: Front) -> None:
    await front.open(answers(500, b'{"error": "mine"}'), answers(500, b'{"error": "mine"}'), ok)
    with front.busy("r2"):
        response = await front.post()
        assert (response.status, await response.read()) == (500, b'{"error": "mine"}')
    assert (await front.event()).error_class == "http_5xx"
    assert not front.stubs[2].asked


async def test_without_another_replica_its_own_503_is_passed_on(front: Front) -> None:
    await front.open(answers(503, b'{"error": "full"}', "retry-after: 9"))
    response = await front.post()
    assert (response.status, response.header("retry-after")) == (503, "9")
    assert await response.read() == b'{"error": "full"}'


async def test_retries_stop_when_their_budget_is_spent(front: Front) -> None:
    front.config = GatewayConfig(retry_budget=BudgetConfig(ratio=0.0, floor_per_s=0.0, burst=2))
    await front.open(dies, dies)
    for _ in range(5):
        assert (await front.post()).status == 502
    assert sum(len(stub.asked) for stub in front.stubs) == 5 + 2


async def test_a_replica_that_is_too_slow_is_504_and_not_asked_again(front: Front) -> None:
    front.config = GatewayConfig(upstream_timeout_s=0.1)

    async def never(asked: Asked, talk: Talk) -> None:
        await talk.until_closed()

    await front.open(never, never)
    response = await front.post()
    assert response.status == 504 and sum(len(stub.asked) for stub in front.stubs) <= 1
    event = await front.event()
    assert (event.error_class, event.num_retries) == ("timeout", 0)


async def test_a_detached_replica_ends_its_streams_with_an_error_event(front: Front) -> None:
    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.sse("1")
        await talk.until_closed()

    await front.open(handle)
    response = await front.post()
    pieces = response.pieces()
    await anext(pieces)
    front.router.set_ready("r0", False)
    await front.gateway.detach("r0")
    assert b'"replica_failed"' in b"".join([data async for _, data in pieces])


async def test_a_caller_who_leaves_in_the_middle_of_a_silent_stream_stops_the_work(front: Front) -> None:
    closed = asyncio.Event()

    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.sse("1")
        await talk.until_closed()
        closed.set()

    await front.open(handle)
    response = await front.post()
    assert (await anext(response.pieces()))[1] == b"data: 1\n\n"
    response.abort()
    await until(closed.is_set)
    event = await front.event()
    assert (event.status, event.error_class) == (200, "disconnect")
    assert front.router.num_in_flight == 0 and not front.faults


async def test_a_caller_who_leaves_before_the_first_byte_stops_the_work(front: Front) -> None:
    closed = asyncio.Event()

    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.until_closed()
        closed.set()

    await front.open(handle, handle)
    asking = asyncio.create_task(front.post())
    await until(lambda: any(stub.num_active for stub in front.stubs))
    asking.cancel()
    await until(closed.is_set)
    event = await front.event()
    assert (event.status, event.error_class, event.num_retries) == (None, "disconnect", 0)
    assert front.router.num_in_flight == 0 and not front.faults
    assert await front.metric("inferloop_gateway_disconnects_total") == 1

"""Where the gateway listens, and how it stops."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from tests.unit.fleet.gateways import Front
from tests.unit.fleet.stubs import Asked, Talk
from tests.waiting import until

from inferloop.backends.http import HttpClient, HttpError
from inferloop.core.errors import PortInUseError
from inferloop.fleet.act.gateway.server import GatewayServer
from inferloop.fleet.act.ports import bind_listener


async def test_a_taken_port_is_said_by_name(front: Front) -> None:
    await front.open()
    port = int(front.server.url.rpartition(":")[2])
    with pytest.raises(PortInUseError, match=str(port)):
        await GatewayServer.start(front.gateway, port=port)


async def test_a_port_that_was_taken_before_is_served_on(front: Front) -> None:
    listener = bind_listener("127.0.0.1", 0)
    await front.open(listener=listener)
    assert front.server.url == f"http://127.0.0.1:{listener.getsockname()[1]}"
    await (await front.post()).read()
    await front.server.stop(0)
    assert listener.fileno() == -1, "it was the server's to close"


def test_accepted_connections_send_small_pieces_at_once() -> None:
    listener = bind_listener("127.0.0.1", 0)
    assert listener.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY only then"
    listener.close()


async def test_a_stream_cut_by_the_stop_ends_with_an_error_event(front: Front) -> None:
    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.sse("1")
        await talk.until_closed()

    await front.open(handle)
    response = await front.post()
    await front.server.stop(0)
    text = await response.read()
    assert text.startswith(b"data: 1\n\n") and json.loads(text.split(b"data: ")[2])["error"]["code"] == "stopping"
    assert (await front.event()).error_class == "stopping"


async def test_a_cancelled_stop_closes_the_door_and_can_be_called_again(front: Front) -> None:
    async def never(asked: Asked, talk: Talk) -> None:
        await talk.until_closed()

    await front.open(never)
    asking = asyncio.create_task(front.post())
    await until(lambda: front.stubs[0].num_active == 1)
    stopping = asyncio.create_task(front.server.stop(600))
    await asyncio.sleep(0.2)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await front.server.stop(0)
    other = HttpClient(front.server.url)
    with pytest.raises(HttpError):
        await other.request("GET", "/health/live")
    asking.cancel()
    await until(lambda: front.router.num_in_flight == 0)


async def test_a_request_cut_before_its_answer_is_503(front: Front) -> None:
    async def never(asked: Asked, talk: Talk) -> None:
        await talk.until_closed()

    await front.open(never)
    asking = asyncio.create_task(front.post())
    await until(lambda: front.stubs[0].num_active == 1)
    await front.server.stop(0)
    assert ((await asking).status, (await front.event()).error_class) == (503, "stopping")


async def test_stopping_lets_a_running_stream_finish(front: Front) -> None:
    gate = asyncio.Event()

    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.sse("1")
        await gate.wait()
        await talk.event("2")
        await talk.end()

    await front.open(handle)
    response = await front.post()
    stopping = asyncio.create_task(front.server.stop(600))
    await asyncio.sleep(0.3)
    assert not stopping.done()
    gate.set()
    assert await response.read() == b"data: 1\n\ndata: 2\n\n"
    await stopping

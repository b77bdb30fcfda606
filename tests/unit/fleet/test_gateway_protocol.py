"""The gateway on the wire, beyond what a client of ours would do: its protocol is that of the replicas."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.unit.fleet.gateways import Front
from tests.unit.fleet.stubs import Asked, Talk, never
from tests.waiting import until

from inferloop.serve.http import MAX_HEAD_BYTES

POST = b"POST /v1/completions HTTP/1.%d\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"


async def stream(asked: Asked, talk: Talk) -> None:
    """Its own body's text, a letter an event."""
    await talk.sse()
    for letter in asked.body.decode():
        await talk.event(letter)
    await talk.end()


async def until_closed(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(60):
        told = await reader.read()
    writer.close()
    return told


async def test_a_stream_ends_with_the_connection_for_http_1_0(front: Front) -> None:
    port = await front.open(stream)
    head, _, body = (await until_closed(port, POST % (0, 3, b"abc"))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head
    assert body == b"data: a\n\ndata: b\n\ndata: c\n\n"


@pytest.mark.parametrize(
    ("last", "status", "code"),
    [
        (LIVE + b"x: " + b"v" * 8 * MAX_HEAD_BYTES, 431, "headers_too_large"),
        (b"nonsense\r\n\r\n", 400, "invalid_http"),
    ],
    ids=["long", "nonsense"],
)
async def test_answers_of_a_connection_come_in_the_order_of_their_requests(
    front: Front, last: bytes, status: int, code: str
) -> None:
    """Those of a replica, the gateway's own, and the refusal of what is no request."""
    port = await front.open(stream)
    told = await until_closed(port, POST % (1, 2, b"ab") + LIVE + b"\r\n" + POST % (1, 1, b"c") + last)
    first, live, second, refusal = told.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 ") and first.index(b"data: a") < first.index(b"data: b")
    assert live.endswith(b'{"status":"live"}') and b"data: c" in second
    assert refusal.startswith(b"%d " % status)
    assert json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["code"] == code


async def test_leaving_ends_what_is_under_way_and_what_waits_behind_it(front: Front) -> None:
    async def endless(asked: Asked, talk: Talk) -> None:
        await talk.sse("1")
        while True:
            await talk.event("2")
            await asyncio.sleep(0.01)

    port = await front.open(endless)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(POST % (1, 1, b"a"))
    await reader.readuntil(b"data: 1")
    writer.write(POST % (1, 1, b"b"))
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.transport.abort()
    await until(lambda: front.router.num_in_flight == 0)


@pytest.mark.parametrize("num_waiting", [1, 5])
async def test_leaving_is_noticed_while_nothing_is_written_and_requests_wait(front: Front, num_waiting: int) -> None:
    port = await front.open(never)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(POST % (1, 1, b"a"))
    await until(lambda: front.stubs[0].num_active == 1)
    for _ in range(num_waiting):
        writer.write(POST % (1, 1, b"b"))
        await writer.drain()
        await asyncio.sleep(0.02)
    writer.transport.abort()
    await until(lambda: front.router.num_in_flight == 0)
    assert len(front.stubs[0].asked) == 1, "what waited is asked of nobody"


async def test_a_connection_that_asks_without_end_is_not_read_without_end(front: Front) -> None:
    port = await front.open(never)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((POST % (1, 1000, b"b" * 1000)) * 100)
    await until(lambda: front.stubs[0].num_active == 1)
    writer.write((POST % (1, 60000, b"b" * 60000)) * 400)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.drain(), 0.3)
    writer.transport.abort()
    await front.server.stop(0)


async def test_a_caller_who_reads_nothing_holds_no_replica(front: Front) -> None:
    left = asyncio.Event()
    held: list[int] = []

    async def flood(asked: Asked, talk: Talk) -> None:
        held.append(front.router.num_in_flight)
        await talk.sse()
        try:
            while True:
                await talk.event("x" * 65536)
        finally:
            left.set()

    port = await front.open(flood, stall_s=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    writer.write(POST % (1, 1, b"a"))
    await reader.read(1)
    await until(left.is_set)  # the replica's connection was closed
    await until(lambda: front.router.num_in_flight == 0)
    assert held == [1]
    assert not front.faults, "the replica is not to blame"
    writer.transport.abort()


async def test_a_caller_who_reads_slowly_is_not_hung_up_on(front: Front) -> None:
    """However long the whole takes, and however long nothing comes."""
    gate = asyncio.Event()

    async def slow(asked: Asked, talk: Talk) -> None:
        await talk.sse("1")
        await gate.wait()
        await talk.event("2")
        await talk.end()

    port = await front.open(slow, stall_s=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(POST % (1, 1, b"a"))
    await reader.readuntil(b"data: 1\n\n")
    await asyncio.sleep(0.3)
    gate.set()
    async with asyncio.timeout(60):
        assert b"data: 2\n\n" in await reader.readuntil(b"0\r\n\r\n")
    writer.close()

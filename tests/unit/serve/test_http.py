"""What comes before a body is bounded, and every refusal is an error of the API's form."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from tests.waiting import PATIENCE_S, until
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.http import MAX_HEAD_BYTES
from inferloop.serve.run import serving

LINE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = build_app(ScriptedGenerator(Script(), model_id="m"), ServeConfig(), DropSink())
    async with serving(app) as url:
        yield int(url.rpartition(":")[2])


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].split("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


def headers(num_bytes: int, num: int = 1) -> bytes:
    return b"".join(b"x-%06d: %b\r\n" % (i, b"v" * (num_bytes // num - 12)) for i in range(num))


@pytest.mark.parametrize("piece", [1000, 1 << 20])
@pytest.mark.parametrize(
    "data",
    [
        LINE + headers(MAX_HEAD_BYTES),
        LINE + headers(MAX_HEAD_BYTES + 500, 500),
        b"GET /" + b"a" * MAX_HEAD_BYTES,
        LINE + b"x: " + b"v" * MAX_HEAD_BYTES,
    ],
    ids=["one", "many", "path", "endless"],
)
async def test_a_head_that_is_too_long_is_refused_before_its_end(port: int, data: bytes, piece: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = data[: MAX_HEAD_BYTES + 1]  # what it does not read any more would reset the connection
    for i in range(0, len(data), piece):
        writer.write(data[i : i + piece])
        await asyncio.sleep(0.0005)
    async with asyncio.timeout(PATIENCE_S):
        status, told = await answer(reader)
    assert (status, told["error"]["code"]) == (431, "headers_too_large")
    assert await reader.read() == b""
    writer.close()


async def test_each_request_of_a_connection_has_a_head_of_its_own(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = LINE + headers(MAX_HEAD_BYTES - 200, 40) + b"\r\n"
    for _ in range(3):
        for i in range(0, len(data), 7000):
            writer.write(data[i : i + 7000])
            await asyncio.sleep(0)
        assert await answer(reader) == (200, {"status": "live"})
    writer.close()


async def test_what_is_no_http_is_told_in_the_apis_form(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"nonsense\r\n\r\n")
    status, told = await answer(reader)
    assert (status, told["error"]["code"]) == (400, "invalid_http") and await reader.read() == b""
    writer.close()


async def test_a_body_does_not_count_to_the_head_of_the_request_behind_it(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    first = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n" + b" " * 60000
    writer.write(first + LINE + headers(1000))
    assert (await answer(reader))[0] == 400
    writer.write(headers(7000))
    await asyncio.sleep(0.01)
    writer.write(b"\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert await answer(reader) == (200, {"status": "live"})
    writer.close()


COMPLETION = json.dumps({"model": "m", "prompt": "x", "max_tokens": 20, "stream": True, "ignore_eos": True}).encode()
STREAM = b"POST /v1/completions HTTP/1.%d\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"


@pytest.fixture
async def generator() -> ScriptedGenerator:
    return ScriptedGenerator(Script(ttft_ms=50, tpot_ms=5), model_id="m")


@pytest.fixture
async def slow_port(generator: ScriptedGenerator) -> AsyncIterator[int]:
    async with serving(build_app(generator, ServeConfig(), DropSink()), wait_ready=True) as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.parametrize(
    ("second", "status"),
    [
        (LINE + headers(MAX_HEAD_BYTES) + headers(100), 431),
        (LINE + b"x: " + b"v" * 5 * MAX_HEAD_BYTES, 431),  # more than one read
        (b"nonsense\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n", 400),
    ],
    ids=["long", "endless", "nonsense", "body"],
)
async def test_a_refusal_comes_behind_the_answers_before_it(slow_port: int, second: bytes, status: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", slow_port)
    writer.write(STREAM % (1, len(COMPLETION), COMPLETION) + LINE + b"\r\n")
    await asyncio.sleep(0)
    writer.write(second)
    async with asyncio.timeout(PATIENCE_S):
        told = await reader.read()
    first, _, rest = told.partition(b"0\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ") and first.count(b"HTTP/1.1") == 1
    assert first.count(b"data: {") == 20 + 1 and b"data: [DONE]" in first
    live, _, refusal = rest.rpartition(b"HTTP/1.1")
    assert live.startswith(b"HTTP/1.1 200 ") and live.endswith(b'{"status":"live"}')
    assert refusal.startswith(b" %d " % status) and b"connection: close" in refusal
    writer.close()


async def test_a_broken_body_is_refused_at_once(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
    await asyncio.sleep(0.02)
    writer.write(b"nonsense\r\n")
    async with asyncio.timeout(PATIENCE_S):
        status, told = await answer(reader)
        assert (status, told["error"]["code"]) == (400, "invalid_http") and await reader.read() == b""
    writer.close()


async def test_leaving_ends_all_requests_of_the_connection(slow_port: int, generator: ScriptedGenerator) -> None:
    """Also the one that is being answered while another waits behind it."""
    endless = json.dumps(
        {"model": "m", "prompt": "x", "max_tokens": 20000, "stream": True, "ignore_eos": True}
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", slow_port)
    writer.write(STREAM % (1, len(endless), endless))
    await reader.readuntil(b"data: {")
    writer.write(STREAM % (1, len(COMPLETION), COMPLETION))
    await asyncio.sleep(0.05)
    writer.transport.abort()
    await until(lambda: not generator.describe()[1].num_running)


async def test_a_body_without_a_length_ends_with_the_connection_for_http_1_0(slow_port: int) -> None:
    """Which knows no chunks (RFC 9112, section 6.1: no transfer coding to such a client)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", slow_port)
    writer.write(STREAM % (0, len(COMPLETION), COMPLETION))
    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    events = body.decode().removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert len(events) == 20 + 2 and events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["object"] == "text_completion"
    writer.close()
    for head in (b"GET /health/live HTTP/1.0\r\n\r\n", b"HEAD /health/live HTTP/1.0\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", slow_port)
        writer.write(head)
        async with asyncio.timeout(PATIENCE_S):
            told = await reader.read()
        assert b"content-length: 17" in told or head.startswith(b"HEAD")
        assert told.endswith(b'{"status":"live"}') == head.startswith(b"GET") and b"chunked" not in told
        writer.close()


def test_uvicorn_still_has_what_the_protocol_relies_on() -> None:
    """None of it is promised to anybody: a version in which this fails needs the protocol looked at."""
    config = uvicorn.Config(lambda *_: None, ws="none", log_config=None)
    protocol = HttpToolsProtocol(config, ServerState(), {}, asyncio.new_event_loop())
    protocol.loop.close()
    for name in ("app", "cycle", "pipeline", "transport", "flow"):
        assert hasattr(protocol, name), name
    for name in (
        *("data_received", "connection_lost", "send_400_response", "on_response_complete"),
        *("on_message_begin", "on_url", "on_header", "on_headers_complete"),
    ):
        assert callable(getattr(HttpToolsProtocol, name)), name
    assert list(inspect.signature(HttpToolsProtocol.send_400_response).parameters) == ["self", "msg"]
    assert protocol.pipeline == deque()
    assert STATUS_LINE[431] == b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    given: dict[str, Any] = dict.fromkeys(inspect.signature(RequestResponseCycle).parameters)
    cycle = RequestResponseCycle(**given)
    assert (cycle.disconnected, cycle.more_body, cycle.response_started) == (False, True, False)
    assert (cycle.chunked_encoding, cycle.expected_content_length) == (None, 0)
    assert {"scope", "message_event"} <= set(vars(cycle))

"""What comes before a body is bounded, and every refusal is an error of the API's form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

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
    asked = asyncio.create_task(answer(reader))
    for i in range(0, len(data), piece):
        if asked.done():
            break  # what it does not read any more would reset the connection
        writer.write(data[i : i + piece])
        await asyncio.sleep(0.0005)
    async with asyncio.timeout(5):
        status, told = await asked
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
    async with asyncio.timeout(5):
        assert await answer(reader) == (200, {"status": "live"})
    writer.close()

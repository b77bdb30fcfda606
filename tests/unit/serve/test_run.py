"""Sockets: the port is ours from the start, small writes go out at once, half a request is an abort."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from tests.waiting import until

from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.core.errors import PortInUseError
from inferloop.records.event import ReplicaEvent
from inferloop.records.sink import JsonlSink, Record
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import bind, serving


class LastSink:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def test_a_taken_port_is_named() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
    bind("127.0.0.1", port).close()


def test_two_starting_servers_get_two_free_ports() -> None:
    with bind("127.0.0.1", 0) as a, bind("127.0.0.1", 0) as b:
        assert a.getsockname() != b.getsockname()


def no_delay_of_connection_to(peer_port: int) -> int:
    """TCP_NODELAY of this process's own end that talks to `peer_port`."""
    for fd in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(fd.name))) as sock:
                if sock.family == socket.AF_INET and sock.getpeername()[1] == peer_port:
                    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        except OSError:
            continue
    raise AssertionError("no such connection")


async def test_small_writes_are_not_delayed() -> None:
    app = build_app(ScriptedGenerator(Script(), model_id="m"), ServeConfig(), LastSink())
    async with serving(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert no_delay_of_connection_to(writer.get_extra_info("sockname")[1]) == 1
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_leaves_in_the_middle_of_its_request_is_an_abort() -> None:
    sink = LastSink()
    app = build_app(ScriptedGenerator(Script(), model_id="m"), ServeConfig(), sink)
    async with serving(app) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"model":')
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        await until(lambda: sink.records)
    [event] = sink.records
    assert isinstance(event, ReplicaEvent)
    assert (event.finish_reason, event.error_class, event.status) == ("abort", "disconnect", None)


async def test_a_full_disk_does_not_touch_answers(tmp_path: Path) -> None:
    """Requests are answered, losses are counted and exposed."""

    class FullFile:
        def write(self, data: bytes, /) -> int:
            raise OSError(28, "No space left on device")

        def seek(self, offset: int, whence: int = 0, /) -> int:
            return 0

        def truncate(self, size: int, /) -> int:
            return size

        def close(self) -> None:
            pass

    sink = JsonlSink(tmp_path / "e.jsonl", opener=lambda _: FullFile())
    app = build_app(ScriptedGenerator(Script(ttft_ms=1, tpot_ms=0), model_id="m"), ServeConfig(), sink)
    async with serving(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = b'{"model":"m","prompt":"x","max_tokens":1}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await until(lambda: sink.num_lost)
        assert b'inferloop_events_lost_total{model_name="m"} 1.0' in app.state.replica.metrics.render()
        writer.close()
        await writer.wait_closed()

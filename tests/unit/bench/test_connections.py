"""What may happen to a connection, over real sockets, from the calling process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from inferloop.bench import engine, exchange
from inferloop.bench.agenda import in_chains
from inferloop.bench.checks import self_checks
from inferloop.bench.client.connection import Connection
from inferloop.bench.client.pool import Pool, failure_class
from inferloop.bench.drive import DriveOptions, DriveResult, Endpoint, drive
from inferloop.bench.render import RenderedRequest
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.slo import Slo
from inferloop.core.units import NS_PER_S
from inferloop.measure.invariants import violations

PEM = Path(__file__).parents[2] / "localhost.pem"
DONE = b"data: [DONE]\n\n"
FRAME = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n' + DONE
UNFINISHED = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
FRAMED = SSE + b"content-length: %d\r\n\r\n" % len(FRAME) + FRAME
CHUNKED = SSE + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(FRAME), FRAME)

Play = Callable[["Server", int, asyncio.StreamWriter], Awaitable[None]]
"""Gets the number of the request and answers it; the connection stays open unless it closes it."""


@dataclass
class Server:
    play: Play
    url: str = ""
    num_connections: int = 0
    heads: list[bytes] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.num_connections += 1
        self.writers.append(writer)
        try:
            await self.answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.transport.abort()
            self.tasks.discard(task)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            self.heads.append(head)
            await self.play(self, len(self.heads) - 1, writer)
            await writer.drain()


@contextlib.asynccontextmanager
async def serving(play: Play, *, tls: bool = False) -> AsyncIterator[Server]:
    server = Server(play)
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(PEM)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=context)
    server.url = f"http{'s' * tls}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in list(server.tasks):
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)


def plan(count: int, *, chains: int = 1, pause_s: float = 0.0) -> list[RenderedRequest]:
    timed = in_chains([TimedRequest(i, 0.0, (Segment(i, 20),), 1) for i in range(count)], chains)
    paused = [replace(t, at_s=pause_s if t.after is not None else 0.0) for t in timed]
    return [RenderedRequest(t, "/v1/chat/completions", b'{"a":1}', 20, 0, False) for t in paused]


async def run(requests: Sequence[RenderedRequest], target: Server | Endpoint, **how: Any) -> DriveResult:
    endpoint = Endpoint(target.url) if isinstance(target, Server) else target
    options = DriveOptions(num_senders=0, max_catch_up_ms=60_000, cut_off_s=20.0, **how)
    result = await drive(requests, endpoint, options)
    assert [violations(t) for t in result.timings] == [()] * len(result.timings)
    return result


def always(data: bytes, *, close: bool = False) -> Play:
    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if close:
            writer.close()

    return play


@pytest.mark.parametrize("data", [FRAMED, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + FRAMED])
async def test_a_connection_serves_again_and_again(data: bytes) -> None:
    async with serving(always(data)) as server:
        result = await run(plan(20), server)
    assert [t.error for t in result.timings] == [None] * 20
    assert server.num_connections == result.senders[0].num_connections == 1
    assert (result.senders[0].num_late_connections, result.senders[0].num_stale_retries) == (0, 0)
    assert result.senders[0].num_bytes_received == 20 * len(data)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50])
async def test_an_answer_reads_the_same_however_it_is_cut(step: int) -> None:
    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        data = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + (CHUNKED if number else FRAMED)
        for i in range(0, len(data), step):
            writer.write(data[i : i + step])
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(play) as server:
        result = await run(plan(2), server)
    assert [(t.error, t.num_output_tokens) for t in result.timings] == [(None, 1)] * 2


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (SSE + b"\r\n" + FRAME, None),  # a body that ends with the connection
        (SSE + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(FRAME) + FRAME, None),
        (SSE + b"\r\n" + FRAME.removesuffix(DONE), None),  # the finish reason says that it is complete
        (SSE + b"\r\n" + UNFINISHED, "truncated"),
        (SSE + b"content-length: 9999\r\n\r\n" + FRAME, None),  # complete at [DONE], and left without an end
        (SSE + b"content-length: 9999\r\n\r\n" + FRAME.removesuffix(DONE), "truncated"),
        (CHUNKED[:-5], None),
        (CHUNKED[:-5] + b"garbage", None),
        (CHUNKED[:-5].replace(DONE, b": stopped    \n"), "truncated"),
        (b"HTTP/1.1 200 OK\r\n", "truncated"),
        (b"", "truncated"),
        (b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno", "http_4xx"),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n", "http_5xx"),
        (b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\nlocation: /\r\n\r\n", "protocol"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "protocol"),
        (FRAMED + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", None),  # an answer too many
        (FRAMED + b"garbage", None),
    ],
)
async def test_each_way_to_end(data: bytes, error: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "STALE_S", 60.0)  # however slow this machine is
    async with serving(always(data, close=True)) as server:
        result = await run(plan(3), server)
    assert [t.error for t in result.timings] == [error] * 3
    # None of them can be used again. Elsewhere nobody tells that the server took what came to nothing on the first.
    assert server.num_connections == (3 if data or sys.platform == "linux" else 4)
    assert result.num_unsent == 0


async def test_an_answer_that_is_left_open_is_complete_at_its_last_event() -> None:
    """The body never ends, and comments go on: nothing that a user waits for."""

    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED[:-5])
        while not writer.is_closing():
            writer.write(b"8\r\n: ping\n\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with serving(play) as server:
        result = await run(plan(12), server, request_timeout_s=300.0)
    assert [(t.error, t.num_output_tokens) for t in result.timings] == [(None, 1)] * 12
    assert [t.t_end_ns for t in result.timings] == [t.chunks[-1].t_ns for t in result.timings], "one read held both"
    assert (server.num_connections, result.senders[0].num_left_open) == (12, 12), "none can be used again"
    told = self_checks(result, result.timings, (), Slo(()), 0.0)
    assert [text.split(":")[0] for text in told.notes if "open" in text] == ["the server left 12 answers open"]
    assert not [text for text in told.void if "Little" in text], "none was in flight while its end was waited for"


async def test_an_end_that_comes_late_leaves_the_connection_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_LEFT_AFTER_NS", 60 * NS_PER_S)

    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED[:-5])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"8\r\n: ping\n\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(UNFINISHED), UNFINISHED))

    async with serving(play) as server:
        result = await run(plan(5), server)
    assert [(t.error, t.num_output_tokens) for t in result.timings] == [(None, 1)] * 5, "nobody reads after [DONE]"
    assert (server.num_connections, result.senders[0].num_left_open) == (1, 0)


class Told:
    """An owner of exchanges that writes down what it hears."""

    def __init__(self) -> None:
        self.outcomes: list[exchange.Outcome] = []
        self.num_left = 0

    def ended(self, _: exchange.Exchange, outcome: exchange.Outcome) -> None:
        self.outcomes.append(outcome)

    def send_again(self, _: exchange.Exchange, *, sure: bool) -> bool:
        return False

    def answered(self, _: exchange.Exchange) -> None: ...

    def left(self, _: exchange.Exchange) -> None:
        self.num_left += 1


@pytest.mark.parametrize("problem", ["timeout", "censored"])
def test_giving_up_after_the_answer_is_no_failure(problem: str) -> None:
    """Without [DONE] more may come, also after a finish reason."""
    for body, error in ((FRAME, None), (FRAME.removesuffix(DONE), problem)):
        owner = Told()
        given = exchange.Exchange(owner, 0, 0, b"", None)
        given.start(None)
        given.head(1, 200, {b"content-type": b"text/event-stream"})
        given.body(2, body)
        given.body(3, b": ping\n\n")
        given.fail(problem, "given up")
        given.fail(problem, "and again")
        (outcome,) = owner.outcomes
        assert (outcome.error, owner.num_left) == (error, int(error is None))
        assert (outcome.t_end_ns == 2) is (error is None), "when the last event came"


async def test_an_idle_connection_that_the_server_closed_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "STALE_S", 60.0)  # however slow this machine is

    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(FRAMED)
        if number % 2 == 0:  # without a word, so that the next request is on its way when the end is seen
            writer.close()

    async with serving(play) as server:
        result = await run(plan(41), server)
    assert [t.error for t in result.timings] == [None] * 41
    assert (len(server.heads), server.num_connections) == (41, 21)
    assert result.senders[0].num_stale_retries == 20, "those that the server never got are as many as there are"


@pytest.mark.parametrize("way", ["close", "reset", "tls"])
async def test_a_server_that_gives_up_requests_cannot_hide_behind_idle_connections(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Every second one, as soon as it has read it. Where that is not certain one may be sent again, and 1 % more."""
    monkeypatch.setattr(exchange, "STALE_S", 60.0)

    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        if number % 2 == 0:
            writer.write(FRAMED)
            return
        if way == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with serving(play, tls=way == "tls") as server:
        result = await run(plan(60), Endpoint(server.url, insecure=way == "tls"))
    (stats,) = result.senders
    assert stats.num_stale_retries == len(server.heads) - 60 <= 1
    if way == "close" and sys.platform == "linux":
        assert stats.num_stale_retries == 0
    assert [t.error for t in result.timings].count("truncated") >= 29


async def test_a_request_that_the_server_dropped_after_a_while_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection that had been closed already shows at once: later it was the request that was given up."""

    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            await asyncio.sleep(0.1)
            writer.close()
        else:
            writer.write(FRAMED)

    monkeypatch.setattr(exchange, "STALE_S", 0.05)
    async with serving(play) as server:
        result = await run(plan(3), server)
    assert [t.error for t in result.timings] == [None, "truncated", None]
    assert result.senders[0].num_stale_retries == 0


async def test_who_no_longer_waits_for_a_connection_is_passed_over() -> None:
    """However many they are."""
    async with serving(always(FRAMED)) as server:
        pool = Pool(Endpoint(server.url), max_connections=1)
        await pool.open(1)
        connection = pool.take()
        assert connection is not None
        for _ in range(5000):
            pool.open_for(lambda *_: False)
        got: list[Connection | None] = []

        def take(connection: Connection | None, _error: str, _detail: str) -> bool:
            got.append(connection)
            return True

        pool.open_for(take)
        pool.free(connection)
        assert got == [connection]
        assert pool.take() is None
        pool.free(connection)
        assert pool.take() is connection
        await pool.close()


async def test_who_waits_hears_that_no_connection_can_be_had() -> None:
    async with serving(always(FRAMED)) as server:
        url = server.url
    pool = Pool(Endpoint(url), max_connections=1)
    told: asyncio.Queue[str] = asyncio.Queue()

    def hear(_connection: Connection | None, error: str, _detail: str) -> bool:
        told.put_nowait(error)
        return False

    for _ in range(3):
        pool.open_for(hear)
    async with asyncio.timeout(60):
        assert [await told.get() for _ in range(3)] == ["connect"] * 3
    await pool.close()


async def test_a_connection_lost_between_two_requests_is_not_used() -> None:
    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(FRAMED)
        await writer.drain()
        writer.close()

    async with serving(play) as server:
        result = await run(plan(3, pause_s=0.1), server)
    assert [t.error for t in result.timings] == [None] * 3
    assert (server.num_connections, result.senders[0].num_stale_retries) == (3, 0)


async def test_connections_are_bounded_and_waiting_for_one_is_told() -> None:
    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(FRAMED)

    requests = [replace(r, timed=replace(r.timed, after=None)) for r in plan(9)]
    async with serving(play) as server:
        result = await run(requests, server, max_connections=3)
    assert [t.error for t in result.timings] == [None] * 9
    assert server.num_connections == 3
    assert result.senders[0].num_pool_waits == 6
    late = sorted(t.t_send_ns - (t.t_intended_ns or 0) for t in result.timings)
    assert late[3] > 15_000_000  # the wait is the client's lateness, and in no service latency


async def test_running_out_of_descriptors_is_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with serving(always(FRAMED)) as server:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
        result = await run(plan(2), server)
    assert [t.error for t in result.timings] == ["client", "client"]
    assert "Too many open files" in result.details["client"]
    assert failure_class(OSError(errno.EADDRNOTAVAIL, "")) == "client"
    assert failure_class(OSError(errno.ECONNREFUSED, "")) == "connect"


async def test_a_name_that_means_nothing_is_the_clients_fault() -> None:
    result = await run(plan(1), Endpoint("http://nowhere.invalid:80"))
    assert [t.error for t in result.timings] == ["client"]


async def test_over_tls() -> None:
    async with serving(always(CHUNKED), tls=True) as server:
        trusted = await run(plan(5), Endpoint(server.url, ca_file=PEM))
        waived = await run(plan(2), Endpoint(server.url, insecure=True))
        named = await run(plan(2), Endpoint(server.url.replace("127.0.0.1", "localhost"), ca_file=PEM))
        refused = await run(plan(2), Endpoint(server.url))
    assert [t.error for t in trusted.timings] == [None] * 5
    assert trusted.senders[0].num_connections == 1
    assert [t.error for t in (*waived.timings, *named.timings)] == [None] * 4
    assert [t.error for t in refused.timings] == ["connect"] * 2
    assert "certificate" in refused.details["connect"].lower()


async def test_a_body_longer_than_the_sockets_buffer_goes_out_whole() -> None:
    body = json.dumps({"a": "x" * 8_000_000}).encode()
    requests = [replace(r, body=body) for r in plan(2)]
    async with serving(always(FRAMED)) as server:
        result = await run(requests, server)
    assert [t.error for t in result.timings] == [None] * 2
    assert result.senders[0].num_bytes_sent > 16_000_000


async def test_an_answer_before_the_whole_request_was_sent_ends_the_connection() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await writer.drain()
        with contextlib.suppress(ConnectionError):
            await asyncio.sleep(0.3)
        writer.transport.abort()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    requests = [replace(r, body=b"x" * 50_000_000) for r in plan(2)]
    result = await run(requests, Endpoint(url))
    listener.close()
    await asyncio.sleep(0.4)
    assert [t.error for t in result.timings] == ["http_4xx"] * 2
    assert result.senders[0].num_connections == 2


async def test_a_json_answer_counts_by_its_usage() -> None:
    body = b'{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":20,"completion_tokens":3}}'
    data = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with serving(always(data)) as server:
        result = await run(plan(3), server)
    assert [(t.error, [c.num_tokens for c in t.chunks]) for t in result.timings] == [(None, [3])] * 3
    assert result.num_length_mismatches == 0
    assert (result.num_tokens_told, result.num_tokens_asked) == (9, 3)


@pytest.mark.parametrize(
    ("kind", "body", "error"),
    [
        (b"text/event-stream", b'data: {"error":{"message":"engine died"}}\n\ndata: [DONE]\n\n', "truncated"),
        (b"text/event-stream", b"data: engine died\n\n", "protocol"),
        (b"text/event-stream", FRAME.replace(b'"stop"', b'"abort"'), "truncated"),
        (b"application/json", b'{"choices":[{"message":{"content":"a"},"finish_reason":"error"}]}', "truncated"),
        (b"application/json", b'{"error":{"message":"engine died"}}', "protocol"),
        (b"Application/JSON; charset=utf-8", b"engine died", "protocol"),
    ],
)
async def test_what_a_server_says_of_a_failure_inside_an_answer_is_kept(kind: bytes, body: bytes, error: str) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
    async with serving(always(head + body)) as server:
        result = await run(plan(1), server)
    assert [t.error for t in result.timings] == [error]
    assert "engine died" in result.details[error] or "finish_reason" in result.details[error]

"""The client against a server that writes exactly the bytes a test wants, when it wants."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
import uvloop
from tests.waiting import PATIENCE_S, skip, until

from inferloop.backends.http import HttpClient, HttpError, _Connection
from inferloop.core.errors import UsageError

Script = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self.heads: list[str] = []
        self.bodies: list[bytes] = []

    async def request(self) -> None:
        """Read one request. Raises IncompleteReadError when the client has closed."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = next((int(h[16:]) for h in head.split("\r\n") if h.startswith("content-length: ")), 0)
        self.heads.append(head)
        self.bodies.append(await self._reader.readexactly(length))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def closed(self) -> None:
        """Return when the client has closed or reset."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(4096):
                pass


class Server:
    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.script: Script = plain
        self.url = ""
        self._listener: asyncio.Server | None = None

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._listener is not None
        self._listener.close()
        for peer in self.peers:
            peer.writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.peers.append(peer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            await self.script(peer)
        writer.transport.abort()


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def chunked(*chunks: bytes) -> bytes:
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + coded


async def plain(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.send(answer(b"hello"))


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.open()
    yield server
    await server.close()


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[HttpClient]:
    client = HttpClient(server.url + "/base/", headers=[("authorization", "Bearer k")])
    yield client
    await client.close()


async def test_what_is_sent_is_what_was_asked(server: Server, client: HttpClient) -> None:
    response = await client.request("POST", "/x?q=1", headers=[("x-one", "1")], body=b"payload")
    assert (response.status, response.header("content-length"), await response.read()) == (200, "5", b"hello")
    head = server.peers[0].heads[0].split("\r\n")
    assert head[0] == "POST /base/x?q=1 HTTP/1.1"
    host = server.url.removeprefix("http://")
    assert {f"host: {host}", "authorization: Bearer k", "x-one: 1", "content-length: 7"} <= set(head[1:])
    assert server.peers[0].bodies == [b"payload"]


async def test_one_connection_serves_one_request_after_another(server: Server, client: HttpClient) -> None:
    for _ in range(5):
        assert await (await client.request("GET", "/")).read() == b"hello"
    assert len(server.peers) == 1 and len(server.peers[0].heads) == 5


async def test_simultaneous_requests_have_a_connection_each_and_share_later(server: Server, client: HttpClient) -> None:
    first = await asyncio.gather(*(client.request("GET", "/") for _ in range(4)))
    await asyncio.gather(*(response.read() for response in first))
    await asyncio.gather(*[(await client.request("GET", "/")).read() for _ in range(4)])
    assert len(server.peers) == 4


async def test_an_answer_not_read_to_its_end_closes_its_connection(server: Server, client: HttpClient) -> None:
    closed = asyncio.Event()

    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(chunked(b"one"))
        await peer.closed()
        closed.set()

    server.script = endless
    response = await client.request("GET", "/")
    async for _, data in response.pieces():
        assert data == b"one"
        response.abort()
        break
    await asyncio.wait_for(closed.wait(), PATIENCE_S)
    response.abort()  # twice is the same as once
    server.script = plain
    assert await (await client.request("GET", "/")).read() == b"hello"
    assert len(server.peers) == 2


async def test_a_kept_connection_that_has_gone_stale_is_replaced_unseen(server: Server, client: HttpClient) -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b"first"))
        await peer.request()  # the second request arrives, and the server is already leaving

    server.script = once
    assert await (await client.request("GET", "/")).read() == b"first"
    server.script = plain
    assert await (await client.request("GET", "/")).read() == b"hello"
    assert len(server.peers) == 2


async def test_a_connection_closed_while_idle_is_not_used_again(server: Server, client: HttpClient) -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b"first"))

    server.script = once
    assert await (await client.request("GET", "/")).read() == b"first"
    await asyncio.sleep(0.05)
    server.script = plain
    assert await (await client.request("GET", "/")).read() == b"hello"


async def test_a_fresh_connection_that_dies_without_a_byte_is_truncated_not_retried(
    server: Server, client: HttpClient
) -> None:
    async def dies(peer: Peer) -> None:
        await peer.request()

    server.script = dies
    with pytest.raises(HttpError) as caught:
        await client.request("GET", "/")
    assert caught.value.kind == "truncated" and len(server.peers) == 1


async def test_a_server_that_closes_on_accept_never_hangs_the_client(server: Server, client: HttpClient) -> None:
    async def slams(peer: Peer) -> None:
        pass

    server.script = slams
    for _ in range(50):
        with pytest.raises(HttpError) as caught:
            await client.request("POST", "/", body=b"x" * 10, timeout_s=PATIENCE_S)
        assert caught.value.kind == "truncated"


async def test_a_connection_lost_before_its_first_request_is_truncated_at_once() -> None:
    connection = _Connection()
    connection.connection_lost(None)  # on uvloop this can come before the connecting task goes on
    connection.begin()
    with pytest.raises(HttpError) as caught:
        await asyncio.wait_for(connection.wait_headers(), PATIENCE_S)
    assert caught.value.kind == "truncated"


@pytest.mark.parametrize(
    "cut",
    [
        b"HTTP/1.1 200 OK\r\ncontent-le",
        answer(b"hello")[:-1],
        chunked(b"one", b"two"),
        chunked(b"one") + b"5\r\nab",
    ],
)
async def test_an_answer_cut_short_is_truncated_after_what_came(server: Server, client: HttpClient, cut: bytes) -> None:
    async def cuts(peer: Peer) -> None:
        await peer.request()
        await peer.send(cut)

    server.script = cuts
    got = b""
    with pytest.raises(HttpError) as caught:
        async for _, data in (await client.request("GET", "/")).pieces():
            got += data
    assert caught.value.kind == "truncated"
    assert cut.endswith(got) or got in (b"onetwo", b"oneab")


async def test_a_body_without_a_length_ends_with_an_orderly_close_only(server: Server, client: HttpClient) -> None:
    orderly = True

    async def to_the_end(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        if orderly:
            peer.writer.close()
            await peer.writer.wait_closed()
        else:
            await asyncio.sleep(0.05)
            peer.writer.transport.get_extra_info("socket").setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER 0: reset

    server.script = to_the_end
    assert await (await client.request("GET", "/")).read() == b"all of it"
    orderly = False
    with pytest.raises(HttpError) as caught:
        await (await client.request("GET", "/")).read()
    assert caught.value.kind == "truncated"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 1000])
async def test_answers_split_at_any_byte_read_the_same(server: Server, client: HttpClient, size: int) -> None:
    wire = chunked(b"data: 1\n\n", b"data: [DONE]\n\n") + b"0\r\n\r\n"

    async def drips(peer: Peer) -> None:
        while True:
            await peer.request()
            for i in range(0, len(wire), size):
                await peer.send(wire[i : i + size])
                await asyncio.sleep(0)

    server.script = drips
    for _ in range(2):
        response = await client.request("GET", "/")
        assert await response.read() == b"data: 1\n\ndata: [DONE]\n\n"
    assert len(server.peers) == 1


async def test_pieces_carry_their_arrival_and_do_not_wait_for_later_ones(server: Server, client: HttpClient) -> None:
    gate = asyncio.Event()

    async def two(peer: Peer) -> None:
        await peer.request()
        await peer.send(chunked(b"one"))
        await gate.wait()
        await peer.send(b"3\r\ntwo\r\n0\r\n\r\n")

    server.script = two
    t_ns = time.monotonic_ns()
    response = await client.request("GET", "/")
    pieces = response.pieces()
    t_one_ns, one = await anext(pieces)
    gate.set()
    t_two_ns, two_data = await anext(pieces)
    assert (one, two_data) == (b"one", b"two")
    assert t_ns <= response.t_headers_ns <= t_one_ns < t_two_ns <= time.monotonic_ns()
    assert [piece async for piece in pieces] == []


async def test_next_bytes_joins_what_has_arrived(server: Server, client: HttpClient) -> None:
    async def three(peer: Peer) -> None:
        await peer.request()
        await peer.send(chunked(b"one", b"two", b"three") + b"0\r\n\r\n")

    server.script = three
    response = await client.request("GET", "/")
    got = []
    while (data := await response.next_bytes()) is not None:
        got.append(data)
    assert b"".join(got) == b"onetwothree" and len(got) < 3
    response.release()


async def test_no_answer_in_time_is_a_timeout_and_the_connection_is_closed(server: Server, client: HttpClient) -> None:
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def silent(peer: Peer) -> None:
        await peer.request()
        arrived.set()
        await peer.closed()
        closed.set()

    server.script = silent
    asked = asyncio.create_task(client.request("GET", "/", timeout_s=60.5))
    await arrived.wait()
    skip(60.5)
    with pytest.raises(HttpError, match=r"no answer within 60\.5 s") as caught:
        await asked
    assert caught.value.kind == "timeout"
    await asyncio.wait_for(closed.wait(), PATIENCE_S)


async def test_cancelling_a_request_closes_its_connection(server: Server, client: HttpClient) -> None:
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def silent(peer: Peer) -> None:
        await peer.request()
        arrived.set()
        await peer.closed()
        closed.set()

    server.script = silent
    asking = asyncio.create_task(client.request("GET", "/"))
    await arrived.wait()
    asking.cancel()
    await asyncio.wait_for(closed.wait(), PATIENCE_S)


async def test_nobody_listening_is_a_connect_error(server: Server, client: HttpClient) -> None:
    await server.close()
    with pytest.raises(HttpError) as caught:
        await client.request("GET", "/")
    assert caught.value.kind == "connect"


async def test_what_is_not_http_is_a_protocol_error(server: Server, client: HttpClient) -> None:
    async def ssh(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"SSH-2.0-OpenSSH_9.2\r\n")

    server.script = ssh
    with pytest.raises(HttpError) as caught:
        await client.request("GET", "/")
    assert caught.value.kind == "protocol"


async def test_interim_answers_are_passed_over(server: Server, client: HttpClient) -> None:
    async def interim(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + answer(b"hello"))

    server.script = interim
    response = await client.request("GET", "/")
    assert (response.status, response.header("link"), await response.read()) == (200, None, b"hello")


async def test_a_second_answer_nobody_asked_for_is_never_taken_for_the_next(server: Server, client: HttpClient) -> None:
    async def twice(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b"mine") + answer(b"smuggled", "x-evil: 1"))
        await peer.closed()

    server.script = twice
    response = await client.request("GET", "/")
    assert (await response.read(), response.header("x-evil")) == (b"mine", None)
    server.script = plain
    assert await (await client.request("GET", "/")).read() == b"hello"
    assert len(server.peers) == 2


async def test_a_slow_reader_makes_the_server_wait(server: Server, client: HttpClient) -> None:
    sent = 0

    async def floods(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(1024):
            await peer.send(b"x" * 65536)
            sent += 65536
        await peer.closed()  # what is on its way would be lost

    server.script = floods
    response = await client.request("GET", "/")
    await until(lambda: sent)
    await asyncio.sleep(0.3)
    assert sent < 32 << 20, "socket buffers and one MiB of ours, not the whole body"
    assert sum([len(data) async for _, data in response.pieces()]) == 64 << 20
    assert sent == 64 << 20


async def test_connection_close_is_honoured(server: Server, client: HttpClient) -> None:
    async def closes(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b"bye", "connection: close"))
        await peer.closed()

    server.script = closes
    for _ in range(2):
        assert await (await client.request("GET", "/")).read() == b"bye"
    assert len(server.peers) == 2


async def test_get_json_names_what_went_wrong(server: Server, client: HttpClient) -> None:
    async def refuses(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b'{"a": 1}'))
        await peer.request()
        await peer.send(answer(b"not here", status="404 Not Found"))
        await peer.request()
        await peer.send(answer(b"<html>\n<p>hello"))

    server.script = refuses
    assert await client.get_json("/a") == {"a": 1}
    with pytest.raises(HttpError, match=r"GET .*/base/b: HTTP 404.*not here"):
        await client.get_json("/b")
    with pytest.raises(HttpError, match=r"GET .*/base/c: not JSON: <html> <p>hello"):
        await client.get_json("/c")


@pytest.mark.parametrize("url", ["ftp://x", "localhost:80", "http://"])
def test_what_is_not_an_http_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not a complete URL"):
        HttpClient(url)


def test_works_on_uvloop() -> None:
    async def main() -> bytes:
        server = Server()
        await server.open()
        client = HttpClient(server.url)
        text = await (await client.request("GET", "/")).read()
        await client.close()
        await server.close()
        return text

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == b"hello"

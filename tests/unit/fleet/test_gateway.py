"""The gateway against stub replicas: what is passed on, what is retried, what is counted, what a fault becomes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from openai.types.responses import ResponseErrorEvent

from inferloop.backends.http import HttpClient, HttpError, Response
from inferloop.core.errors import PortInUseError
from inferloop.fleet.act.gateway.app import Gateway
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.gateway.server import GatewayServer
from inferloop.fleet.act.ports import bind_listener
from inferloop.fleet.decide.retry import BudgetConfig
from inferloop.fleet.decide.router import Lease, Router
from inferloop.records.event import GatewayEvent

if TYPE_CHECKING:
    from tests.unit.fleet.conftest import Asked, Handler, MakeStub, Stub, Talk

CHAT = "/v1/chat/completions"


class ListSink:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


class Front:
    """A running gateway over stubs r0, r1, ... and a client of it."""

    def __init__(self, make_stub: MakeStub) -> None:
        self._make_stub = make_stub
        self.router = Router(seed=0, max_in_flight=100)
        self.sink = ListSink()
        self.faults: list[tuple[str, str]] = []
        self.stubs: list[Stub] = []
        self.config = GatewayConfig(service="svc", max_body_bytes=100_000)

    async def open(self, *handlers: Handler) -> None:
        self.gateway = Gateway(
            self.router, config=self.config, sink=self.sink, on_fault=lambda *fault: self.faults.append(fault)
        )
        for i, handler in enumerate(handlers):
            stub = await self._make_stub(handler)
            self.stubs.append(stub)
            self.gateway.attach(f"r{i}", stub.url)
            self.router.set_ready(f"r{i}", True)
        self.server = await GatewayServer.start(self.gateway)
        self.client = HttpClient(self.server.url)

    async def post(self, body: bytes = b"{}", path: str = CHAT, **headers: str) -> Response:
        pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
        return await self.client.request("POST", path, body=body, headers=pairs, timeout_s=10)

    @contextmanager
    def busy(self, replica_id: str) -> Iterator[None]:
        """Count one request at this replica, so that the others are asked first."""
        others = [load.replica_id for load in self.router.snapshot() if load.replica_id != replica_id]
        for other in others:
            self.router.set_ready(other, False)
        lease = self.router.admit()
        for other in others:
            self.router.set_ready(other, True)
        assert isinstance(lease, Lease)
        with lease:
            yield

    async def event(self) -> GatewayEvent:
        """The one event of the last request; the caller may see the end before it is written."""
        await eventually(lambda: len(self.sink.records) > 0)
        assert len(self.sink.records) == 1
        record = self.sink.records.pop()
        assert isinstance(record, GatewayEvent)
        return record

    async def metric(self, line: str) -> float:
        text = (await (await self.client.request("GET", "/metrics")).read()).decode()
        return next(float(row.rpartition(" ")[2]) for row in text.splitlines() if row.rpartition(" ")[0] == line)

    async def close(self) -> None:
        await self.client.close()
        await self.server.stop(0)
        await self.gateway.close()
        assert self.router.num_in_flight == 0, "every test gives every lease back"


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  what is awaited has no event of its own
            await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def front(make_stub: MakeStub) -> AsyncIterator[Front]:
    front = Front(make_stub)
    yield front
    await front.close()


async def ok(asked: Asked, talk: Talk) -> None:
    await talk.json(200, b'{"ok": true}')


def says(status: int, body: bytes = b'{"error": {}}', *extra: str) -> Handler:
    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.json(status, body, *extra)

    return handle


async def dies(asked: Asked, talk: Talk) -> None:
    talk.cut()


async def test_the_event_names_the_identity_that_the_replica_told(front: Front) -> None:
    await front.open(says(200, b"{}", "x-inferloop-identity: abc123"))
    assert (await front.post()).header("x-inferloop-identity") == "abc123"
    assert (await front.event()).identity_digest == "abc123"


async def test_the_event_of_an_unknown_engine_has_no_identity(front: Front) -> None:
    await front.open(ok)
    await front.post()
    assert (await front.event()).identity_digest is None


async def test_a_request_and_its_answer_pass_through_unchanged(front: Front) -> None:
    await front.open(says(200, b'{"answer":\t1}', "x-extra: kept", "connection: keep-alive", "date: long ago"))
    body = b'{"not": "parsed", broken'
    response = await front.post(
        body, CHAT + "?a=%20b", authorization="Bearer k", connection="x-hop", x_hop="no", accept_encoding="gzip"
    )
    assert (response.status, await response.read()) == (200, b'{"answer":\t1}')
    assert response.header("x-extra") == "kept" and response.header("date") != "long ago"
    assert response.header("x-inferloop-replica") == "r0"
    asked = front.stubs[0].asked[0]
    assert (asked.method, asked.target, asked.body) == ("POST", CHAT + "?a=%20b", body)
    assert asked.headers["authorization"] == "Bearer k"
    assert not {"x-hop", "connection", "accept-encoding"} & set(asked.headers)


async def test_ids_and_trace_run_through(front: Front) -> None:
    await front.open(ok)
    trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    response = await front.post(x_request_id="mine-1", traceparent=f"00-{trace_id}-{parent}-01")
    await response.read()
    sent = front.stubs[0].asked[0].headers
    event = await front.event()
    assert response.header("x-request-id") == sent["x-request-id"] == event.request_id == "mine-1"
    assert sent["traceparent"] == f"00-{trace_id}-{event.span_id}-01" and event.span_id != parent
    assert event.trace_id == trace_id and event.service == "svc"
    assert (event.status, event.replica, event.num_retries, event.error_class) == (200, "r0", 0, None)
    assert event.t_first_byte_ns is not None and event.t_last_byte_ns is not None
    assert event.t_router_in_ns <= event.t_first_byte_ns <= event.t_last_byte_ns
    fresh = await front.post(x_request_id="bad id\t")
    await fresh.read()
    assert (fresh.header("x-request-id") or "").startswith("req-")


async def test_tokens_arrive_one_by_one_while_the_replica_still_works(front: Front) -> None:
    gate = asyncio.Event()

    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.sse("1")
        await gate.wait()
        await talk.event("[DONE]")
        await talk.end()

    await front.open(handle)
    response = await front.post()
    pieces = response.pieces()
    assert (await anext(pieces))[1] == b"data: 1\n\n"
    assert front.router.in_flight("r0") == 1
    gate.set()
    assert [data async for _, data in pieces] == [b"data: [DONE]\n\n"]
    assert response.header("content-type") == "text/event-stream"
    assert (await front.event()).error_class is None
    assert front.gateway.num_bytes_from("r0") == len(b"data: 1\n\ndata: [DONE]\n\n")


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


async def test_a_last_event_without_its_blank_line_is_passed_on_at_an_orderly_end(front: Front) -> None:
    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.sse("1")
        await talk.chunk(b"data: [DONE]")
        await talk.end()

    await front.open(handle)
    assert await (await front.post()).read() == b"data: 1\n\ndata: [DONE]"


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


@pytest.mark.parametrize("broken", [dies, dies_before_its_first_token, says(500), says(503, b"{}", "retry-after: 9")])
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
    await front.open(says(500, b'{"error": "mine"}'), says(500, b'{"error": "mine"}'), ok)
    with front.busy("r2"):
        response = await front.post()
        assert (response.status, await response.read()) == (500, b'{"error": "mine"}')
    assert (await front.event()).error_class == "http_5xx"
    assert not front.stubs[2].asked


async def test_without_another_replica_its_own_503_is_passed_on(front: Front) -> None:
    await front.open(says(503, b'{"error": "full"}', "retry-after: 9"))
    response = await front.post()
    assert (response.status, response.header("retry-after")) == (503, "9")
    assert await response.read() == b'{"error": "full"}'


async def test_retries_stop_when_their_budget_is_spent(front: Front) -> None:
    front.config = GatewayConfig(retry_budget=BudgetConfig(ratio=0.0, floor_per_s=0.0, burst=2))
    await front.open(dies, dies)
    for _ in range(5):
        assert (await front.post()).status == 502
    assert sum(len(stub.asked) for stub in front.stubs) == 5 + 2


async def test_bad_requests_are_the_callers_and_harm_nobody(front: Front) -> None:
    async def strict(asked: Asked, talk: Talk) -> None:
        await talk.json(400 if len(asked.body) > 1000 else 200, b'{"from": "replica"}')

    await front.open(strict, strict)
    for _ in range(30):
        response = await front.post(b"x" * 5000)
        assert (response.status, await response.read()) == (400, b'{"from": "replica"}')
    assert (await front.post(b"short")).status == 200
    assert sum(len(stub.asked) for stub in front.stubs) == 31, "a 4xx is never tried elsewhere"
    assert not front.faults and front.router.num_ready == 2
    assert await front.metric('inferloop_gateway_requests_total{code="400"}') == 30
    assert {e.error_class for e in front.sink.records[:30]} == {"http_4xx"}


async def test_a_429_is_passed_on_with_its_retry_after(front: Front) -> None:
    await front.open(says(429, b"{}", "retry-after: 7"), ok)
    with front.busy("r1"):
        response = await front.post()
    assert (response.status, response.header("retry-after")) == (429, "7") and not front.stubs[1].asked


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
    await asyncio.wait_for(closed.wait(), 10)
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
    await eventually(lambda: any(stub.num_active for stub in front.stubs))
    asking.cancel()
    await asyncio.wait_for(closed.wait(), 10)
    event = await front.event()
    assert (event.status, event.error_class, event.num_retries) == (None, "disconnect", 0)
    assert front.router.num_in_flight == 0 and not front.faults
    assert await front.metric("inferloop_gateway_disconnects_total") == 1


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/responses", CHAT + "/render", "/v1/embeddings", "/tokenize"]
)
async def test_load_is_counted_and_spread_on_every_route(front: Front, path: str) -> None:
    gate = asyncio.Event()

    async def slow(asked: Asked, talk: Talk) -> None:
        await gate.wait()
        await talk.json(200, b"{}")

    await front.open(slow, slow, slow, slow)
    asking = [asyncio.create_task(front.post(b"shared prefix", path)) for _ in range(64)]
    await eventually(lambda: sum(stub.num_active for stub in front.stubs) == 64)
    assert [stub.num_active for stub in front.stubs] == [16] * 4
    assert {load.in_flight for load in front.router.snapshot()} == {16}
    gate.set()
    assert {response.status for response in await asyncio.gather(*asking)} == {200}
    assert front.router.num_in_flight == 0


async def test_nothing_ready_is_503_with_retry_after_and_an_event(front: Front) -> None:
    await front.open()
    response = await front.post()
    assert (response.status, response.header("retry-after")) == (503, "1")
    assert (await response.json())["error"]["code"] == "no_replica_ready"
    assert (await front.event()).admission == "refused:no_replica_ready"
    assert (await front.client.request("GET", "/health/ready")).status == 503
    assert (await front.client.request("GET", "/health/live")).status == 200


async def test_beyond_the_bound_is_503_and_the_bound_is_never_passed(make_stub: MakeStub, front: Front) -> None:
    front.router = Router(max_in_flight=2)
    gate = asyncio.Event()

    async def slow(asked: Asked, talk: Talk) -> None:
        await gate.wait()
        await talk.json(200, b"{}")

    await front.open(slow)
    asking = [asyncio.create_task(front.post()) for _ in range(2)]
    await eventually(lambda: front.stubs[0].num_active == 2)
    response = await front.post()
    assert (response.status, (await response.json())["error"]["code"]) == (503, "saturated")
    assert await front.metric('inferloop_gateway_refusals_total{reason="saturated"}') == 1
    gate.set()
    assert [r.status for r in await asyncio.gather(*asking)] == [200, 200]


async def test_a_body_beyond_the_limit_is_413_and_goes_nowhere(front: Front) -> None:
    await front.open(ok)
    response = await front.post(b"x" * 200_000)
    assert response.status == 413 and not front.stubs[0].asked
    assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_what_the_gateway_does_not_know_is_404_or_405(front: Front) -> None:
    await front.open(ok)
    assert (await front.post(path="/admin")).status == 404
    assert (await front.client.request("PATCH", CHAT)).status == 405
    models = await front.client.request("GET", "/v1/models")
    assert models.status == 200 and front.stubs[0].asked[-1].method == "GET"


@pytest.mark.parametrize(
    ("replicas", "status", "num_cancelled"),
    [
        ([says(404), says(200, b'{"request_id": "a-1", "num_cancelled": 2}')], 200, 2),
        ([says(200, b'{"request_id": "a-1", "num_cancelled": 2}')] * 2 + [dies], 200, 4),
        ([says(404), says(404)], 404, None),
        ([says(404), dies], 502, None),
        ([says(404), says(200, b"[]")], 404, None),
        ([], 404, None),
    ],
)
async def test_cancelling_asks_every_replica(
    front: Front, replicas: list[Handler], status: int, num_cancelled: int | None
) -> None:
    await front.open(*replicas)
    answer = await front.post(b"", path="/v1/requests/a-1/cancel")
    body = await answer.json()
    assert (answer.status, body.get("num_cancelled")) == (status, num_cancelled)
    assert [stub.asked[0].target for stub in front.stubs] == ["/v1/requests/a-1/cancel"] * len(replicas)
    assert front.faults == [], "what cannot be asked is found out by requests"


async def test_a_replica_that_is_too_slow_is_504_and_not_asked_again(front: Front) -> None:
    front.config = GatewayConfig(upstream_timeout_s=0.1)

    async def never(asked: Asked, talk: Talk) -> None:
        await talk.until_closed()

    await front.open(never, never)
    response = await front.post()
    assert response.status == 504 and sum(len(stub.asked) for stub in front.stubs) == 1
    assert (await front.event()).error_class == "timeout"


async def test_a_slow_reader_slows_the_replica_and_not_the_memory(front: Front) -> None:
    sent = 0

    async def flood(asked: Asked, talk: Talk) -> None:
        nonlocal sent
        await talk.sse()
        for _ in range(1000):
            await talk.event("x" * 65536)
            sent += 65536
        await talk.end()

    await front.open(flood)
    response = await front.post()
    await asyncio.sleep(0.5)
    assert 0 < sent < 40 << 20, "64 MiB were on offer; buffers on the way hold only a few"
    assert sum([len(data) async for _, data in response.pieces()]) == 1000 * (65536 + 8)


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


async def test_a_taken_port_is_said_by_name(front: Front) -> None:
    await front.open()
    port = int(front.server.url.rpartition(":")[2])
    with pytest.raises(PortInUseError, match=str(port)):
        await GatewayServer.start(front.gateway, port=port)


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
    await eventually(lambda: front.stubs[0].num_active == 1)
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
    await eventually(lambda: front.router.num_in_flight == 0)


async def test_a_request_cut_before_its_answer_is_503(front: Front) -> None:
    async def never(asked: Asked, talk: Talk) -> None:
        await talk.until_closed()

    await front.open(never)
    asking = asyncio.create_task(front.post())
    await eventually(lambda: front.stubs[0].num_active == 1)
    await front.server.stop(0)
    assert ((await asking).status, (await front.event()).error_class) == (503, "stopping")


async def test_our_own_failure_is_a_500_with_an_event(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    await front.open(ok)
    front.gateway._upstreams.clear()  # a bug of ours, made on purpose
    response = await front.post()
    assert (response.status, (await response.json())["error"]["code"]) == (500, "gateway_failed")
    assert (await front.event()).error_class == "gateway_failed" and "KeyError" in caplog.text


async def test_stopping_lets_a_running_stream_finish(front: Front) -> None:
    gate = asyncio.Event()

    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.sse("1")
        await gate.wait()
        await talk.event("2")
        await talk.end()

    await front.open(handle)
    response = await front.post()
    stopping = asyncio.create_task(front.server.stop(10))
    await asyncio.sleep(0.3)
    assert not stopping.done()
    gate.set()
    assert await response.read() == b"data: 1\n\ndata: 2\n\n"
    await stopping

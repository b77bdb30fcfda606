"""The gateway against stub replicas: what is passed on, what is answered here, what is counted."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.fleet.gateways import CHAT, Front
from tests.unit.fleet.stubs import Asked, Handler, MakeStub, Talk, answers, dies, ok
from tests.waiting import until

from inferloop.fleet.decide.router import Router


async def test_the_event_names_the_identity_that_the_replica_told(front: Front) -> None:
    await front.open(answers(200, b"{}", "x-inferloop-identity: abc123"))
    assert (await front.post()).header("x-inferloop-identity") == "abc123"
    assert (await front.event()).identity_digest == "abc123"


async def test_the_event_of_an_unknown_engine_has_no_identity(front: Front) -> None:
    await front.open(ok)
    await front.post()
    assert (await front.event()).identity_digest is None


async def test_a_request_and_its_answer_pass_through_unchanged(front: Front) -> None:
    await front.open(answers(200, b'{"answer":\t1}', "x-extra: kept", "connection: keep-alive", "date: long ago"))
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


async def test_a_last_event_without_its_blank_line_is_passed_on_at_an_orderly_end(front: Front) -> None:
    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.sse("1")
        await talk.chunk(b"data: [DONE]")
        await talk.end()

    await front.open(handle)
    assert await (await front.post()).read() == b"data: 1\n\ndata: [DONE]"


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
    await front.open(answers(429, b"{}", "retry-after: 7"), ok)
    with front.busy("r1"):
        response = await front.post()
    assert (response.status, response.header("retry-after")) == (429, "7") and not front.stubs[1].asked


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
    await until(lambda: sum(stub.num_active for stub in front.stubs) == 64)
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
    for path in ("/health/ready", "/health"):
        assert (await front.client.request("GET", path)).status == 503
    assert (await front.client.request("GET", "/health/live")).status == 200


async def test_beyond_the_bound_is_503_and_the_bound_is_never_passed(make_stub: MakeStub, front: Front) -> None:
    front.router = Router(max_in_flight=2)
    gate = asyncio.Event()

    async def slow(asked: Asked, talk: Talk) -> None:
        await gate.wait()
        await talk.json(200, b"{}")

    await front.open(slow)
    asking = [asyncio.create_task(front.post()) for _ in range(2)]
    await until(lambda: front.stubs[0].num_active == 2)
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
        ([answers(404), answers(200, b'{"request_id": "a-1", "num_cancelled": 2}')], 200, 2),
        ([answers(200, b'{"request_id": "a-1", "num_cancelled": 2}')] * 2 + [dies], 200, 4),
        ([answers(404), answers(404)], 404, None),
        ([answers(404), dies], 502, None),
        ([answers(404), answers(200, b"[]")], 404, None),
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
    await until(lambda: sent > 0)
    await asyncio.sleep(0.5)
    assert sent < 40 << 20, "64 MiB were on offer; buffers on the way hold only a few"
    assert sum([len(data) async for _, data in response.pieces()]) == 1000 * (65536 + 8)


async def test_our_own_failure_is_a_500_with_an_event(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    await front.open(ok)
    front.gateway._upstreams.clear()  # a bug of ours, made on purpose
    response = await front.post()
    assert (response.status, (await response.json())["error"]["code"]) == (500, "gateway_failed")
    assert (await front.event()).error_class == "gateway_failed" and "KeyError" in caplog.text

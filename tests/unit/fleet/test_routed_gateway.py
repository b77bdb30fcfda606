"""The gateway of a service with several models, over stubs: who is asked, what the caller sees, what is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from inferloop.backends.http import HttpClient, Response
from inferloop.contract.workload import Escalation, EvalTag, ModelRef, NamedModel, Price, Routing, RoutingRule
from inferloop.fleet.act.gateway.app import Gateway
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.gateway.server import GatewayServer
from inferloop.fleet.decide.retry import BudgetConfig
from inferloop.fleet.decide.router import Router
from inferloop.fleet.decide.routes import HANDOVER_S
from inferloop.records.event import GatewayEvent

if TYPE_CHECKING:
    from tests.unit.fleet.conftest import Asked, Handler, MakeStub, Stub, Talk

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "now"}}]}
ROUTING = Routing(
    models=(
        NamedModel("cheap", ModelRef("small"), Price(1.0, 0.5, 2.0)),
        NamedModel("strong", ModelRef("large"), Price(10.0, 5.0, 20.0)),
    ),
    default="cheap",
    rules=(
        RoutingRule("code", "strong"),
        RoutingRule("extract", "cheap", "json"),
        RoutingRule("do", "cheap", "tool_call"),
    ),
    eval_tags=(EvalTag("polite", lacks=("damn",)),),
    escalation=Escalation("cheap", ("strong",), 2, invalid_json=True, refused_tool=True),
)
GOOD, BROKEN = '{"sky": "blue"}', '{"sky": "bl'


def escalating(**checks: Any) -> Routing:
    assert ROUTING.escalation is not None
    return replace(ROUTING, escalation=replace(ROUTING.escalation, **checks))


class Clock:
    """Stands still but for what a test lets pass."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def now_ns(self) -> int:
        return self.now

    def wall_ns(self) -> int:
        return self.now


class Sink:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


class Desk:
    """A running gateway over one stub per model (more with `also`), and a client of it."""

    def __init__(self, make_stub: MakeStub) -> None:
        self._make_stub = make_stub
        self.router, self.sink, self.clock = Router(max_in_flight=100), Sink(), Clock()
        self.stubs: dict[str, Stub] = {}

    async def open(self, *, routing: Routing = ROUTING, budget: BudgetConfig | None = None, **models: Handler) -> None:
        config = GatewayConfig(service="desk", routing=routing, retry_budget=budget or BudgetConfig())
        self.gateway = Gateway(self.router, config=config, sink=self.sink, clock=self.clock)
        for name, handler in models.items():
            self.stubs[name] = await self._make_stub(handler)
            self.gateway.attach(f"{name}-r0", self.stubs[name].url)
            self.router.assign(f"{name}-r0", name.split("_")[0])
            self.router.set_ready(f"{name}-r0", True)
        self.server = await GatewayServer.start(self.gateway)
        self.client = HttpClient(self.server.url)

    async def post(self, path: str = CHAT, headers: dict[str, str] | None = None, **body: Any) -> Response:
        start: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]} if path == CHAT else {}
        data = json.dumps(start | body).encode()
        return await self.client.request("POST", path, body=data, headers=list((headers or {}).items()), timeout_s=20)

    def sent(self, model: str, i: int = -1) -> Any:
        return json.loads(self.stubs[model].asked[i].body)

    async def event(self) -> GatewayEvent:
        await eventually(lambda: len(self.sink.records) > 0)
        (record,) = self.sink.records
        assert isinstance(record, GatewayEvent)
        self.sink.records.clear()
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
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  what is awaited has no event of its own
            await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def desk(make_stub: MakeStub) -> AsyncIterator[Desk]:
    made = Desk(make_stub)
    yield made
    await made.close()


def usage(num_input: int, num_output: int, num_cached: int = 0) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": num_cached}}
    return {"prompt_tokens": num_input, "completion_tokens": num_output, **details}


def says(
    text: str,
    *,
    calls: dict[str, str] | None = None,
    logprobs: list[float] | None = None,
    counts: dict[str, Any] | None = None,
    before: Callable[[Talk], Awaitable[None]] | None = None,
) -> Handler:
    """A model that answers every chat or completion so, whole or streamed, with its usage."""
    used = counts or usage(100, 10, 40)

    async def handle(asked: Asked, talk: Talk) -> None:
        if before is not None:
            await before(talk)
        body = json.loads(asked.body)
        told = {"content": [{"token": "x", "logprob": value} for value in logprobs or ()]}
        shown = told if body.get("logprobs") else None
        made = [
            {"id": "c", "index": i, "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate((calls or {}).items())
        ]
        if not body.get("stream"):
            message = {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}
            choice = {"index": 0, "message": message, "logprobs": shown, "finish_reason": "stop"}
            await talk.json(200, json.dumps({"model": body["model"], "choices": [choice], "usage": used}).encode())
            return
        asks = body.get("stream_options", {}).get("include_usage")
        extra: dict[str, Any] = {"usage": None} if asks else {}
        deltas = [{"content": text[:3]}, {"content": text[3:]}, *({"tool_calls": [call]} for call in made)]
        frames = [{"choices": [{"index": 0, "delta": d, "logprobs": shown}], **extra} for d in deltas]
        frames += [{"choices": [], "usage": used}] if asks else []
        await talk.sse(*(json.dumps(frame, separators=(",", ":")) for frame in frames), "[DONE]")
        await talk.end()

    return handle


def refuses(status: int) -> Handler:
    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.json(status, b'{"error": {"message": "no"}}')

    return handle


async def dies(asked: Asked, talk: Talk) -> None:
    talk.cut()


async def never(asked: Asked, talk: Talk) -> None:
    await talk.until_closed()


def chunks(text: bytes) -> list[Any]:
    return [json.loads(event[6:]) for event in text.split(b"\n\n") if event and event != b"data: [DONE]"]


def content(text: bytes) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks(text) if c.get("choices"))


def said(text: bytes) -> str:
    """Of a whole answer or a stream."""
    return content(text) if text.startswith(b"data:") else json.loads(text)["choices"][0]["message"]["content"]


async def test_broken_json_is_escalated_in_one_trace_and_both_are_paid(desk: Desk) -> None:
    await desk.open(cheap=says(BROKEN), strong=says(GOOD, counts=usage(100, 20)))
    trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace_id}-{parent}-01", "x-request-id": "mine"}
    response = await desk.post(headers=headers, model="desk", **JSON)
    answer = await response.json()
    assert answer["choices"][0]["message"]["content"] == GOOD
    assert (answer["model"], answer["usage"]["completion_tokens"]) == ("strong", 20), "what the caller sees is the last"
    assert response.header("x-inferloop-model") == "strong" and response.header("x-inferloop-replica") == "strong-r0"
    assert response.header("x-inferloop-hops") == "2"
    assert response.header("x-inferloop-failed-checks") == "invalid_json"
    assert response.header("x-inferloop-escalation-missed") is None

    event = await desk.event()
    assert (event.trace_id, event.parent_id, event.request_id) == (trace_id, parent, "mine")
    assert (event.status, event.model, event.replica, event.error_class) == (200, "strong", "strong-r0", None)
    first, second = event.hops
    assert (first.model, first.route, first.failed_checks, first.delivered) == (
        "cheap",
        "default",
        ("invalid_json",),
        False,
    )
    assert (second.model, second.route, second.delivered) == ("strong", "escalated:invalid_json", True)
    assert {first.parent_id, second.parent_id} == {event.span_id} and first.span_id != second.span_id
    for number, hop in enumerate(event.hops, start=1):
        sent = desk.stubs[hop.model].asked[0].headers
        assert sent["traceparent"] == f"00-{trace_id}-{hop.span_id}-01", "the replica's row hangs below the hop"
        assert (sent["x-inferloop-attempt"], sent["x-request-id"]) == (str(number), "mine")
        assert desk.sent(hop.model)["model"] == hop.model
    assert (first.num_input_tokens, first.num_cached_tokens, first.num_output_tokens) == (100, 40, 10)
    assert first.cost_usd == pytest.approx((60 * 1 + 40 * 0.5 + 10 * 2) / 1e6)
    assert second.cost_usd == pytest.approx((100 * 10 + 20 * 20) / 1e6)
    assert event.cost_usd == pytest.approx(100e-6 + 1400e-6)
    escalations = 'inferloop_gateway_escalations_total{check="invalid_json",model="cheap",next="strong"}'
    assert await desk.metric(escalations) == 1
    assert await desk.metric('inferloop_gateway_cost_usd_total{model="cheap"}') == pytest.approx(first.cost_usd)


async def test_an_answer_that_holds_is_delivered_after_one_hop(desk: Desk) -> None:
    await desk.open(cheap=says(GOOD), strong=says(GOOD))
    response = await desk.post(**JSON)
    assert (await response.json())["choices"][0]["message"]["content"] == GOOD
    assert response.header("x-inferloop-hops") == "1" and response.header("x-inferloop-failed-checks") is None
    event = await desk.event()
    assert [hop.model for hop in event.hops] == ["cheap"] and event.cost_usd == event.hops[0].cost_usd
    assert not desk.stubs["strong"].asked


@pytest.mark.parametrize("asks_usage", [False, True])
async def test_a_stream_shows_nothing_of_the_answer_that_failed(desk: Desk, asks_usage: bool) -> None:
    await desk.open(cheap=says(BROKEN), strong=says(GOOD, counts=usage(100, 20)))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asks_usage else {}
    response = await desk.post(stream=True, **JSON, **options)
    assert response.header("content-type") == "text/event-stream" and response.header("x-inferloop-hops") == "2"
    text = await response.read()
    assert content(text) == GOOD and text.endswith(b"data: [DONE]\n\n")
    assert (b"usage" in text) is asks_usage
    event = await desk.event()
    assert [hop.num_output_tokens for hop in event.hops] == [10, 20], "counted also where nobody asked to see it"


async def test_the_last_model_streams_as_it_answers(desk: Desk) -> None:
    gate = asyncio.Event()

    async def slow(asked: Asked, talk: Talk) -> None:
        await talk.sse('{"choices":[{"index":0,"delta":{"content":"{"}}]}')
        await gate.wait()
        await talk.event("[DONE]")
        await talk.end()

    await desk.open(cheap=says(BROKEN), strong=slow)
    pieces = (await desk.post(stream=True, **JSON)).pieces()
    assert b'"content":"{"' in (await anext(pieces))[1]
    gate.set()
    assert [data async for _, data in pieces] == [b"data: [DONE]\n\n"]


@pytest.mark.parametrize("asks_usage", [False, True])
async def test_a_held_stream_that_holds_is_the_answer_to_the_letter(desk: Desk, asks_usage: bool) -> None:
    await desk.open(cheap=says(GOOD), strong=says(GOOD))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asks_usage else {}
    text = await (await desk.post(stream=True, **JSON, **options)).read()
    assert content(text) == GOOD and text.endswith(b"data: [DONE]\n\n")
    assert [frame["usage"] for frame in chunks(text) if frame.get("usage")] == (
        [usage(100, 10, 40)] if asks_usage else []
    )
    assert (b"usage" in text) is asks_usage


async def test_what_no_check_can_look_at_streams_at_once(desk: Desk) -> None:
    gate = asyncio.Event()

    async def slow(asked: Asked, talk: Talk) -> None:
        await talk.sse('{"choices":[{"index":0,"delta":{"content":"Hi"}}],"usage":null}')
        await gate.wait()
        await talk.end()

    await desk.open(cheap=slow, strong=says(GOOD))
    pieces = (await desk.post(stream=True)).pieces()
    assert (await anext(pieces))[1] == b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
    gate.set()
    assert [data async for _, data in pieces] == []


@pytest.mark.parametrize(
    ("body", "headers", "asked"),
    [
        ({"model": "cheap", **JSON}, {}, ["cheap"]),
        ({"model": "small", **JSON}, {}, ["cheap"]),
        ({"model": "strong", **JSON}, {}, ["strong"]),
        ({"model": "desk"}, {"x-inferloop-class": "code"}, ["strong"]),
        ({"model": "desk"}, {"x-inferloop-class": "extract"}, ["cheap", "strong"]),
        ({"model": "desk"}, {"x-inferloop-class": "do"}, ["cheap", "strong"]),
        ({"model": "desk"}, {"x-inferloop-class": "else"}, ["cheap"]),
        ({"model": "cheap"}, {"x-inferloop-class": "extract"}, ["cheap"]),
        (TOOLS | {"tool_choice": "required"}, {}, ["cheap", "strong"]),
        (TOOLS | {"tool_choice": "auto"}, {}, ["cheap"]),
        (TOOLS | {"tool_choice": "none"}, {}, ["cheap"]),
        ({"structured_outputs": {"json": {"type": "object"}}}, {}, ["cheap", "strong"]),
    ],
)
async def test_who_is_asked(desk: Desk, body: dict[str, Any], headers: dict[str, str], asked: list[str]) -> None:
    """The cheap model says no JSON and calls no tool."""
    await desk.open(cheap=says("No."), strong=says("Yes."))
    assert (await desk.post(headers=headers, **body)).status == 200
    event = await desk.event()
    assert [hop.model for hop in event.hops] == asked
    assert event.traffic_class == headers.get("x-inferloop-class")
    for model in asked:
        assert desk.sent(model) | {"model": ""} == {"messages": [{"role": "user", "content": "?"}], **body, "model": ""}


async def test_a_call_of_a_tool_that_is_not_offered_is_escalated(desk: Desk) -> None:
    await desk.open(cheap=says("", calls={"later": "{}"}), strong=says("", calls={"now": "{}"}))
    for stream in (False, True):
        text = await (await desk.post(stream=stream, **TOOLS)).read()
        assert b'"now"' in text and b"later" not in text
        assert (await desk.event()).hops[0].failed_checks == ("refused_tool",)


SHAPE = {"type": "object", "properties": {"sky": {"type": "string"}}, "required": ["sky"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_json_that_does_not_satisfy_the_schema_is_escalated(desk: Desk, stream: bool) -> None:
    await desk.open(cheap=says('{"sky": 7}'), strong=says(GOOD))
    asked: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "sky", "schema": SHAPE}}
    }
    assert said(await (await desk.post(stream=stream, **asked)).read()) == GOOD
    assert (await desk.event()).hops[0].failed_checks == ("invalid_json",)
    asked["response_format"]["json_schema"] = {"name": "sky", "schema": {"$ref": "http://elsewhere.invalid/x"}}
    assert said(await (await desk.post(stream=stream, **asked)).read()) == '{"sky": 7}', "what it is cannot be told"


async def test_a_call_with_arguments_that_do_not_satisfy_the_parameters_is_escalated(desk: Desk) -> None:
    await desk.open(cheap=says("", calls={"look": '{"sky": 7}'}), strong=says("", calls={"look": GOOD}))
    text = await (
        await desk.post(tools=[{"type": "function", "function": {"name": "look", "parameters": SHAPE}}])
    ).read()
    assert b"blue" in text and (await desk.event()).hops[0].failed_checks == ("refused_tool",)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unsure_answer_is_escalated_and_log_probabilities_stay_who_asked_for_them(
    desk: Desk, stream: bool
) -> None:
    unsure, sure = says("Bonn?", logprobs=[-0.1, -4.0]), says("Berlin", logprobs=[-0.1])
    await desk.open(routing=escalating(low_logprob=-2.0), cheap=unsure, strong=sure)
    assert said(await (await desk.post(stream=stream)).read()) == "Berlin"
    assert desk.sent("cheap")["logprobs"] is True and "logprobs" not in desk.sent("strong")
    assert (await desk.event()).hops[0].failed_checks == ("low_logprob",)

    desk.stubs["cheap"].handle = says("Berlin", logprobs=[-0.1, -0.2])
    text = await (await desk.post(stream=stream)).read()
    assert said(text) == "Berlin" and b"-0.2" not in text and b'"logprobs":null' in text
    assert b"-0.2" in await (await desk.post(stream=stream, logprobs=True)).read()


async def test_a_failed_eval_tag_is_escalated_by_name(desk: Desk) -> None:
    await desk.open(routing=escalating(eval_tags=("polite",)), cheap=says("damn"), strong=says("Sorry."))
    response = await desk.post()
    assert (await response.json())["choices"][0]["message"]["content"] == "Sorry."
    assert response.header("x-inferloop-failed-checks") == "eval_tag:polite"


@pytest.mark.parametrize(
    ("path", "cheap", "strong"),
    [
        (COMPLETIONS, {"choices": [{"text": BROKEN}]}, {"choices": [{"text": GOOD}]}),
        (
            RESPONSES,
            {"output": [{"type": "message", "content": [{"type": "output_text", "text": BROKEN}]}]},
            {"output": [{"type": "message", "content": [{"type": "output_text", "text": GOOD}]}]},
        ),
    ],
)
async def test_the_other_endpoints_are_checked_too(desk: Desk, path: str, cheap: Any, strong: Any) -> None:
    def whole(body: Any) -> Handler:
        async def handle(asked: Asked, talk: Talk) -> None:
            counts = {"input_tokens": 5, "output_tokens": 2} if path == RESPONSES else usage(5, 2)
            await talk.json(200, json.dumps(body | {"usage": counts}).encode())

        return handle

    await desk.open(cheap=whole(cheap), strong=whole(strong))
    wants: dict[str, Any] = {"text": {"format": {"type": "json_object"}}, "input": "?"}
    if path == COMPLETIONS:
        wants = {"structured_outputs": {"json_object": True}, "prompt": "?"}
    response = await desk.post(path, **wants)
    assert (await response.json())["usage"] and response.header("x-inferloop-model") == "strong"
    assert [(hop.num_input_tokens, hop.num_output_tokens) for hop in (await desk.event()).hops] == [(5, 2), (5, 2)]


async def test_a_stream_of_responses_is_held_and_escalated(desk: Desk) -> None:
    def stream_of(text: str) -> Handler:
        async def handle(asked: Asked, talk: Talk) -> None:
            output = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
            answer = {"output": output, "usage": {"input_tokens": 5, "output_tokens": 2}}
            await talk.sse()
            for kind, body in (("response.created", {"output": []}), ("response.completed", answer)):
                data = json.dumps({"type": kind, "response": body}, separators=(",", ":"))
                await talk.chunk(f"event: {kind}\ndata: {data}\n\n".encode())
            await talk.end()

        return handle

    await desk.open(cheap=stream_of(BROKEN), strong=stream_of(GOOD))
    response = await desk.post(RESPONSES, stream=True, input="?", text={"format": {"type": "json_object"}})
    text = await response.read()
    assert text.count(b"event: response.completed") == 1 and json.dumps(GOOD).encode() in text
    assert "stream_options" not in desk.sent("cheap"), "their usage comes by itself"
    assert [hop.num_output_tokens for hop in (await desk.event()).hops] == [2, 2]


@pytest.mark.parametrize(
    ("strong", "missed"),
    [(refuses(500), "http_5xx"), (refuses(400), "http_400"), (dies, "truncated"), (None, "no_replica_ready")],
)
async def test_when_the_strong_model_fails_the_cheap_answer_is_delivered_and_says_so(
    desk: Desk, strong: Handler | None, missed: str
) -> None:
    models: dict[str, Any] = {"cheap": says(BROKEN)} | ({"strong": strong} if strong else {})
    await desk.open(**models)
    response = await desk.post(**JSON)
    assert (await response.json())["choices"][0]["message"]["content"] == BROKEN
    assert response.status == 200 and response.header("x-inferloop-model") == "cheap"
    assert response.header("x-inferloop-hops") == "2"
    assert response.header("x-inferloop-failed-checks") == "invalid_json"
    told = response.header("x-inferloop-escalation-missed")
    assert told == ("http_500" if missed == "http_5xx" else missed)
    event = await desk.event()
    assert (event.status, event.model, event.error_class, event.escalation_missed) == (200, "cheap", None, told)
    assert [hop.delivered for hop in event.hops] == [True, False] and event.hops[1].error_class is not None
    assert event.cost_usd == event.hops[0].cost_usd and event.hops[1].cost_usd is None


@pytest.mark.parametrize(("cheap", "status"), [(refuses(500), 500), (refuses(400), 400), (dies, 502)])
async def test_a_first_hop_without_an_answer_stays_what_it_was(desk: Desk, cheap: Handler, status: int) -> None:
    await desk.open(cheap=cheap, strong=says(GOOD), budget=BudgetConfig(0, 0, 0))
    assert (await desk.post(**JSON)).status == status
    event = await desk.event()
    assert len(event.hops) == 1 and not desk.stubs["strong"].asked and event.error_class is not None


async def test_unavailable_asks_the_next_model_and_both_may_be(desk: Desk) -> None:
    await desk.open(routing=escalating(unavailable=True), cheap=dies, strong=says("Yes."), budget=BudgetConfig(0, 0, 0))
    response = await desk.post(stream=True)
    assert content(await response.read()) == "Yes."
    assert response.header("x-inferloop-failed-checks") == "unavailable"
    assert [hop.status for hop in (await desk.event()).hops] == [None, 200]

    desk.stubs["strong"].handle = refuses(503)
    response = await desk.post()
    assert response.status == 503 and response.header("x-inferloop-hops") == "2"
    event = await desk.event()
    assert [hop.error_class for hop in event.hops] == ["truncated", "http_5xx"] and event.error_class == "http_5xx"
    assert event.cost_usd is None, "not known is not zero"

    desk.stubs["cheap"].handle = refuses(400)
    assert (await desk.post()).status == 400, "what the caller did wrong is wrong everywhere"


async def test_a_fault_is_retried_on_a_replica_of_the_same_model(desk: Desk) -> None:
    await desk.open(cheap=dies, strong=says("strong"))
    other = await desk._make_stub(says(GOOD))
    desk.gateway.attach("cheap-r1", other.url)
    desk.router.assign("cheap-r1", "cheap")
    for _ in range(4):
        desk.router.set_ready("cheap-r1", True)
        assert (await (await desk.post(**JSON)).json())["choices"][0]["message"]["content"] == GOOD
        event = await desk.event()
        assert [hop.model for hop in event.hops] == ["cheap"] and event.num_retries == event.hops[0].num_retries
    assert not desk.stubs["strong"].asked


async def test_no_time_left_delivers_the_answer_in_hand(desk: Desk) -> None:
    async def takes_5_s(talk: Talk) -> None:
        desk.clock.now += 5_000_000_000

    await desk.open(cheap=says(BROKEN, before=takes_5_s), strong=says(GOOD))
    response = await desk.post(headers={"x-request-timeout-ms": "5000"}, **JSON)
    assert (await response.json())["choices"][0]["message"]["content"] == BROKEN
    assert response.header("x-inferloop-escalation-missed") == "deadline" and not desk.stubs["strong"].asked
    event = await desk.event()
    assert (event.escalation_missed, len(event.hops), event.hops[0].delivered) == ("deadline", 1, True)

    response = await desk.post(headers={"x-request-timeout-ms": "20000"}, **JSON)
    assert (await response.json())["choices"][0]["message"]["content"] == GOOD
    assert desk.stubs["cheap"].asked[-1].headers["x-request-timeout-ms"] == "20000"
    left_ms = desk.stubs["strong"].asked[-1].headers["x-request-timeout-ms"]
    assert left_ms == str(round(15_000 - HANDOVER_S * 1000)), "what the first has left of it"


async def test_a_strong_model_that_is_too_slow_leaves_the_cheap_answer(desk: Desk) -> None:
    await desk.open(cheap=says(BROKEN), strong=never)
    response = await desk.post(headers={"x-request-timeout-ms": "300"}, **JSON)
    assert (await response.json())["choices"][0]["message"]["content"] == BROKEN
    assert response.header("x-inferloop-escalation-missed") == "timeout"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("silent", ["cheap", "strong"])
async def test_a_caller_who_leaves_cancels_the_hop_in_flight(desk: Desk, silent: str, stream: bool) -> None:
    closed = asyncio.Event()

    async def works(asked: Asked, talk: Talk) -> None:
        if stream:
            await talk.sse('{"choices":[]}')
        await talk.until_closed()
        closed.set()

    models: dict[str, Any] = {"cheap": says(BROKEN), "strong": says(GOOD), silent: works}
    await desk.open(**models)
    asking = asyncio.create_task(desk.post(stream=stream, **JSON))
    await eventually(lambda: desk.stubs[silent].num_active > 0)
    if stream and silent == "strong":
        (await asking).abort()
    else:
        asking.cancel()
    await asyncio.wait_for(closed.wait(), 30)
    event = await desk.event()
    assert event.error_class == "disconnect" and [hop.model for hop in event.hops][-1] == silent
    assert len(desk.stubs["strong"].asked) == (silent == "strong"), "nobody else is asked for who has left"
    assert desk.router.num_in_flight == 0
    assert event.cost_usd == (event.hops[0].cost_usd if silent == "strong" else None)


@pytest.mark.parametrize("ending", ["cut", "error", "early"])
async def test_a_held_stream_that_breaks_is_an_error_and_no_half_answer(desk: Desk, ending: str) -> None:
    async def breaks(asked: Asked, talk: Talk) -> None:
        await talk.sse('{"choices":[{"index":0,"delta":{"content":"secret"}}]}')
        if ending == "cut":
            talk.cut()
            return
        if ending == "error":
            await talk.event('{"error":{"message":"the engine failed"}}')
        await talk.end()

    await desk.open(cheap=breaks, strong=says(GOOD))
    response = await desk.post(stream=True, **JSON)
    text = await response.read()
    assert response.status == 502 and json.loads(text)["error"]["code"] == "replica_failed" and b"secret" not in text
    event = await desk.event()
    assert (event.status, event.error_class, len(event.hops)) == (502, "truncated", 1)


async def test_the_last_models_stream_that_breaks_ends_with_an_error_event(desk: Desk) -> None:
    async def breaks(asked: Asked, talk: Talk) -> None:
        await talk.sse('{"choices":[{"index":0,"delta":{"content":"{"}}]}')
        talk.cut()

    await desk.open(cheap=says(BROKEN), strong=breaks)
    text = await (await desk.post(stream=True, **JSON)).read()
    assert content(text) == "{" and chunks(text)[-1]["error"]["code"] == "replica_failed"
    event = await desk.event()
    assert (event.error_class, event.hops[1].error_class, event.hops[1].delivered) == ("truncated", "truncated", True)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, IMAGE]}]},
            "messages[0].content[1]",
        ),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"audio": {"voice": "alloy"}}, "audio"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        (CHAT + "/render", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ],
)
async def test_what_is_not_text_is_refused_before_any_model(desk: Desk, path: str, body: Any, param: str) -> None:
    await desk.open(cheap=says(GOOD), strong=says(GOOD))
    response = await desk.post(path, **body)
    error = (await response.json())["error"]
    assert (response.status, error["param"], error["code"]) == (400, param, "unsupported_content")
    assert not any(stub.asked for stub in desk.stubs.values())
    event = await desk.event()
    assert (event.error_class, event.hops, event.cost_usd) == ("http_4xx", (), None)


async def test_an_unknown_model_is_404_with_those_that_exist(desk: Desk) -> None:
    await desk.open(cheap=says(GOOD), strong=says(GOOD))
    response = await desk.post(model="gpt-9")
    error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "desk, cheap, strong" in error["message"]


@pytest.mark.parametrize("body", [b"{broken", b"", b"[]", b'{"model": "desk", "stream_options": 7, "stream": true}'])
async def test_what_cannot_be_read_is_left_to_the_default_model(desk: Desk, body: bytes) -> None:
    await desk.open(cheap=refuses(400), strong=says(GOOD))
    response = await desk.client.request("POST", CHAT, body=body, headers=[], timeout_s=20)
    assert response.status == 400 and len(desk.stubs["cheap"].asked) == 1
    if b"model" not in body:
        assert desk.stubs["cheap"].asked[0].body == body


async def test_models_are_listed_as_their_replicas_tell_of_them(desk: Desk) -> None:
    def tells(length: int) -> Handler:
        async def handle(asked: Asked, talk: Talk) -> None:
            await talk.json(
                200, json.dumps({"data": [{"id": "x", "object": "model", "max_model_len": length}]}).encode()
            )

        return handle

    await desk.open(cheap=tells(2048), strong=dies)
    listed = await (await desk.client.request("GET", "/v1/models")).json()
    assert [(entry["id"], entry.get("max_model_len")) for entry in listed["data"]] == [
        ("desk", 2048),
        ("cheap", 2048),
        ("strong", None),
    ]
    one = await (await desk.client.request("GET", "/v1/models/desk")).json()
    assert (one["id"], one["max_model_len"]) == ("desk", 2048)
    assert (await desk.client.request("GET", "/v1/models/nobody")).status == 404


async def test_readiness_is_that_of_the_default_model_and_tells_of_each(desk: Desk) -> None:
    await desk.open(cheap=says(GOOD), strong=says(GOOD))
    desk.router.set_ready("strong-r0", False)
    ready = await desk.client.request("GET", "/health/ready")
    assert (ready.status, (await ready.json())["models"]) == (200, {"cheap": 1, "strong": 0})
    refused = await desk.post(model="strong")
    assert refused.status == 503 and "of model strong" in (await refused.json())["error"]["message"]
    desk.router.set_ready("cheap-r0", False)
    assert (await desk.client.request("GET", "/health/ready")).status == 503


async def test_other_routes_go_to_the_model_that_they_name(desk: Desk) -> None:
    async def counts(asked: Asked, talk: Talk) -> None:
        await talk.json(200, json.dumps({"usage": {"prompt_tokens": 7, "total_tokens": 7}}).encode())

    await desk.open(cheap=counts, strong=counts)
    await (await desk.post("/v1/embeddings", model="strong", input="a text")).read()
    event = await desk.event()
    assert (event.model, event.hops[0].num_input_tokens) == ("strong", 7)
    assert event.hops[0].cost_usd == pytest.approx(70e-6)
    await (await desk.post("/tokenize", model="desk", prompt="a text")).read()
    assert desk.sent("cheap") == {"model": "cheap", "prompt": "a text"}

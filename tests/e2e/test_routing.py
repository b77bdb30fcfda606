"""A cheap model and a strong one behind one gateway, as processes: escalation, cost and trace, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import psutil
import pytest
from tests.waiting import PATIENCE_S, until

from inferloop.backends.http import HttpClient, Response
from inferloop.backends.protocols import LaunchSpec
from inferloop.backends.serve_process import launch_spec
from inferloop.contract.load import parse
from inferloop.contract.workload import Routing
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.supervise import Fleet, FleetConfig
from inferloop.fleet.decide.replicas import ReplicaPolicy
from inferloop.records.event import GatewayEvent, ReplicaEvent
from inferloop.records.sink import JsonlSink

CHAT = "/v1/chat/completions"
CHEAP, STRONG = '{"city": "Ber', '{"city": "Berlin"}'
STALLS: dict[str, object] = {"error_rate": 1.0, "error_kind": "stall", "error_after_tokens": 4}
FAILS: dict[str, object] = {"error_rate": 1.0, "error_kind": "engine", "error_after_tokens": 4}
"""After the one token that proves a replica ready."""
CONTRACT: dict[str, Any] = {
    "service": "desk",
    "traffic": {"qps": 1, "input_tokens": {"p50": 30}, "output_tokens": {"p50": 8}},
    "models": {
        "cheap": {"id": "one", "usd_per_mtok": {"input": 1, "cached_input": 0.5, "output": 2}},
        "strong": {"id": "two", "usd_per_mtok": 30},
    },
    "routing": {
        "default": "cheap",
        "rules": [{"class": "extract", "model": "cheap", "expect": "json"}],
        "escalation": {"from": "cheap", "to": "strong", "on": ["invalid_json"]},
    },
}


def routing() -> Routing:
    found = parse(CONTRACT).routing
    assert found is not None
    return found


def plays(tmp_path: Path, name: str, **script: object) -> LaunchSpec:
    pairs = [f"{key}={value}" for key, value in {"ttft_ms": 1, "tpot_ms": 1, **script}.items()]
    options = {"script": pairs, "replica": "{replica}", "events": str(tmp_path / "events-{replica}.jsonl")}
    return launch_spec(name, options, backend="scripted", drain_timeout_s=60.0)


@asynccontextmanager
async def desk(tmp_path: Path, cheap: LaunchSpec, strong: LaunchSpec) -> AsyncIterator[tuple[Fleet, HttpClient]]:
    before = set(psutil.Process().children(recursive=True))
    config = FleetConfig(
        tmp_path / "logs",
        probe_period_s=0.1,
        policy=ReplicaPolicy(backoff_base_s=0.05),
        gateway=GatewayConfig(service="desk", routing=routing()),
    )
    sink = JsonlSink(tmp_path / "gateway.jsonl")
    async with Fleet({"cheap": cheap, "strong": strong}, config, sink=sink) as fleet:
        await fleet.start({"cheap": 1, "strong": 1})
        client = HttpClient(fleet.url)
        yield fleet, client
        await client.close()
    sink.close()
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert not left, f"left behind: {left}"


async def ask(client: HttpClient, *, traffic_class: str = "extract", headers: Any = (), **body: Any) -> Response:
    start = {"model": "desk", "messages": [{"role": "user", "content": "Which city?"}]}
    sent = [("content-type", "application/json"), ("x-inferloop-class", traffic_class), *headers]
    return await client.request(
        "POST", CHAT, body=msgspec.json.encode(start | body), headers=sent, timeout_s=2 * PATIENCE_S
    )


def rows(path: Path, kind: type[Any]) -> list[Any]:
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()] if path.exists() else []


def num_rows(path: Path) -> int:
    """Whole ones, of a file that is being written."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def test_broken_json_is_escalated_and_the_rows_of_all_three_join(tmp_path: Path) -> None:
    cheap, strong = plays(tmp_path, "cheap", text=CHEAP), plays(tmp_path, "strong", text=STRONG)
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with desk(tmp_path, cheap, strong) as (_, client):
        response = await ask(client, headers=[("traceparent", f"00-{trace_id}-00f067aa0ba902b7-01")])
        answer = await response.json()
        assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("strong", STRONG)
        assert (response.header("x-inferloop-model"), response.header("x-inferloop-hops")) == ("strong", "2")
    (event,) = rows(tmp_path / "gateway.jsonl", GatewayEvent)
    (first,) = rows(tmp_path / "events-cheap-r0.jsonl", ReplicaEvent)
    (second,) = rows(tmp_path / "events-strong-r0.jsonl", ReplicaEvent)
    assert {event.trace_id, first.trace_id, second.trace_id} == {trace_id}
    assert {event.request_id, first.request_id, second.request_id} == {response.header("x-request-id")}
    assert [first.parent_id, second.parent_id] == [hop.span_id for hop in event.hops], "a span per hop"
    assert [first.attempt, second.attempt] == [1, 2]
    assert [first.traffic_class, second.traffic_class, event.traffic_class] == ["extract"] * 3
    assert [(hop.model, hop.failed_checks, hop.delivered) for hop in event.hops] == [
        ("cheap", ("invalid_json",), False),
        ("strong", (), True),
    ]
    for hop, row in zip(event.hops, (first, second), strict=True):
        assert (hop.num_input_tokens, hop.num_output_tokens) == (row.num_input_tokens, row.num_output_tokens)
        assert hop.identity_digest == row.identity_digest
    assert answer["usage"]["completion_tokens"] == second.num_output_tokens, "the caller sees the last answer's"
    usd = (first.num_input_tokens * 1 + first.num_output_tokens * 2) / 1e6
    usd += (second.num_input_tokens + second.num_output_tokens) * 30 / 1e6
    assert event.cost_usd == pytest.approx(usd)


async def test_streams_through_the_openai_client(tmp_path: Path) -> None:
    cheap, strong = plays(tmp_path, "cheap", text=CHEAP), plays(tmp_path, "strong", text=STRONG)
    async with desk(tmp_path, cheap, strong) as (fleet, _):  # noqa: SIM117  the second needs the first's URL
        async with openai.AsyncOpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["desk", "desk/extract", "cheap", "strong"]
            for model, traffic_class, text in (
                ("desk", "extract", STRONG),
                ("desk", "chat", CHEAP),
                ("cheap", "extract", CHEAP),
                ("strong", "chat", STRONG),
            ):
                stream = await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": "Which city?"}],
                    stream=True,
                    extra_headers={"x-inferloop-class": traffic_class},
                )
                chunks = [chunk async for chunk in stream]
                assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
                assert {c.model for c in chunks} == {"strong" if text == STRONG else "cheap"}
                assert all(c.usage is None and c.choices for c in chunks), "nobody asked for it"
            with pytest.raises(openai.BadRequestError, match="only text content"):
                await client.chat.completions.create(
                    model="desk",
                    messages=[
                        {
                            "role": "user",
                            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
                        }
                    ],
                )
    told = rows(tmp_path / "gateway.jsonl", GatewayEvent)
    assert [len(event.hops) for event in told] == [0, 2, 1, 1, 1, 0], "the list of models asks none of them"
    assert all(event.cost_usd for event in told[1:5]) and told[5].status == 400


async def test_a_caller_who_leaves_frees_the_model_that_is_asked(tmp_path: Path) -> None:
    cheap = plays(tmp_path, "cheap", text=CHEAP)
    strong = plays(tmp_path, "strong", text=STRONG, **STALLS)
    async with desk(tmp_path, cheap, strong) as (fleet, client):
        asking = asyncio.create_task(ask(client))
        await until(lambda: {r.model: r.in_flight for r in fleet.status().replicas}["strong"] == 1)
        assert {r.model: r.in_flight for r in fleet.status().replicas}["cheap"] == 0, "each has its own load"
        asking.cancel()
        await until(lambda: fleet.status().num_in_flight == 0)
        await until(lambda: num_rows(tmp_path / "events-strong-r0.jsonl") == 1)
    (event,) = rows(tmp_path / "gateway.jsonl", GatewayEvent)
    (aborted,) = rows(tmp_path / "events-strong-r0.jsonl", ReplicaEvent)
    assert (event.error_class, event.status, aborted.error_class) == ("disconnect", None, "disconnect")
    assert event.hops[1].span_id == aborted.parent_id and event.cost_usd == event.hops[0].cost_usd


async def test_a_deadline_ends_the_second_hop_and_the_first_answer_is_delivered(tmp_path: Path) -> None:
    cheap = plays(tmp_path, "cheap", text=CHEAP)
    strong = plays(tmp_path, "strong", text=STRONG, **STALLS)
    async with desk(tmp_path, cheap, strong) as (_, client):
        for within_ms in (1000, 5000, 30_000):  # the least of these in which this machine can give the first answer
            response = await ask(client, headers=[("x-request-timeout-ms", str(within_ms))])
            answer, missed = await response.json(), response.header("x-inferloop-escalation-missed")
            if response.status == 200 and missed != "deadline":
                break
            assert response.status in (200, 408, 504)
        assert answer["choices"][0]["message"]["content"] == CHEAP
        assert response.header("x-inferloop-model") == "cheap" and missed in ("http_408", "timeout")
        await until(lambda: num_rows(tmp_path / "events-strong-r0.jsonl") == 1)


async def test_a_fault_of_the_first_model_stays_its_fault(tmp_path: Path) -> None:
    cheap, strong = plays(tmp_path, "cheap", **FAILS), plays(tmp_path, "strong", text=STRONG)
    async with desk(tmp_path, cheap, strong) as (_, client):
        response = await ask(client)
        assert response.status == 500
        assert json.loads(await response.read())["error"]["code"] == "engine_error"
        assert response.header("x-inferloop-hops") == "1", "a fault is no answer that failed a check"
    (event,) = rows(tmp_path / "gateway.jsonl", GatewayEvent)
    assert event.error_class == "http_5xx" and event.cost_usd is None


async def test_with_unavailable_both_may_fail_and_each_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONTRACT["routing"]["escalation"], "on", ["invalid_json", "unavailable"])
    cheap, strong = plays(tmp_path, "cheap", **FAILS), plays(tmp_path, "strong", **FAILS)
    async with desk(tmp_path, cheap, strong) as (_, client):
        for stream in (False, True):
            response = await ask(client, stream=stream)
            text = await response.read()
            assert (response.status, response.header("x-inferloop-hops")) == (200 if stream else 500, "2")
            assert json.loads(text.removeprefix(b"data: ").split(b"data: ")[-1])["error"], "told in a stream too"
    for event in rows(tmp_path / "gateway.jsonl", GatewayEvent):
        assert [hop.failed_checks for hop in event.hops] == [("unavailable",), ()] and event.cost_usd is None


async def test_a_dead_strong_model_leaves_the_service_up(tmp_path: Path) -> None:
    cheap, strong = plays(tmp_path, "cheap", text=CHEAP), plays(tmp_path, "strong", text=STRONG)
    async with desk(tmp_path, cheap, strong) as (fleet, client):
        pid = next(r.pid for r in fleet.status().replicas if r.model == "strong")
        assert pid is not None
        psutil.Process(pid).kill()
        response = await ask(client)
        assert response.status == 200
        text = (await response.json())["choices"][0]["message"]["content"]
        assert text == STRONG if response.header("x-inferloop-model") == "strong" else text == CHEAP
        assert (await client.request("GET", "/health/ready")).status == 200
        await until(
            lambda: any(r.model == "strong" and r.num_restarts and r.state == "ready" for r in fleet.status().replicas)
        )
        assert (await (await ask(client)).json())["model"] == "strong", "it is back"

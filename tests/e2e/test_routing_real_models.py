"""Escalation between real models: one small model in two precisions, and (where somebody has fetched Gemma) two."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferloop.backends.http import HttpClient, Response
from inferloop.backends.serve_process import launch_spec
from inferloop.catalog.models import known_models
from inferloop.contract.load import parse
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.supervise import Fleet, FleetConfig
from inferloop.models.cache import cached_path
from inferloop.models.resolve import ModelFiles
from inferloop.records.event import GatewayEvent, ReplicaEvent
from inferloop.records.sink import JsonlSink

SMOL, GEMMA = "smollm2-135m-instruct", "gemma3-270m"
TRAFFIC = {"qps": 1, "input_tokens": {"p50": 30}, "output_tokens": {"p50": 8}}


@asynccontextmanager
async def service(tmp_path: Path, models: dict[str, Any], on: list[Any]) -> AsyncIterator[HttpClient]:
    routing = {
        "default": "cheap",
        "rules": [{"class": "extract", "model": "cheap", "expect": "json"}],
        "escalation": {"from": "cheap", "to": "strong", "on": on},
    }
    contract = parse({"service": "desk", "traffic": TRAFFIC, "models": models, "routing": routing})
    assert contract.routing is not None
    specs = {
        m.name: launch_spec(
            m.ref.id,
            {
                "dtype": m.ref.precision.weights or "auto",
                "served_model_name": m.name,
                "kv_memory_mib": 128,
                "context_length": 2048,
                "threads": 2,
                "replica": "{replica}",
                "events": str(tmp_path / "replica-{replica}.jsonl"),
            },
            ready_timeout_s=300,
        )
        for m in contract.routing.models
    }
    config = FleetConfig(tmp_path / "logs", gateway=GatewayConfig(service="desk", routing=contract.routing))
    sink = JsonlSink(tmp_path / "gateway.jsonl")
    async with Fleet(specs, config, sink=sink) as fleet:
        await fleet.start(dict.fromkeys(specs, 1))
        client = HttpClient(fleet.url)
        yield client
        await client.close()
    sink.close()


async def post(client: HttpClient, path: str, traffic_class: str | None = None, **body: Any) -> Response:
    headers = [("x-inferloop-class", traffic_class)] if traffic_class else []
    data = msgspec.json.encode({"model": "desk", "max_tokens": 12, "temperature": 0} | body)
    return await client.request("POST", path, body=data, headers=headers, timeout_s=120)


def told(tmp_path: Path) -> tuple[list[GatewayEvent], dict[str, list[ReplicaEvent]]]:
    def rows(name: str, kind: type[Any]) -> list[Any]:
        return [msgspec.json.decode(line, type=kind) for line in (tmp_path / name).read_bytes().splitlines()]

    replicas = {name: rows(f"replica-{name}-r0.jsonl", ReplicaEvent) for name in ("cheap", "strong")}
    return rows("gateway.jsonl", GatewayEvent), replicas


def assert_joined(event: GatewayEvent, replicas: dict[str, list[ReplicaEvent]], models: list[str]) -> None:
    assert [hop.model for hop in event.hops] == models
    usd = 0.0
    for hop in event.hops:
        (row,) = (row for row in replicas[hop.model] if row.parent_id == hop.span_id)
        assert row.trace_id == event.trace_id and row.identity_digest == hop.identity_digest
        counts = (row.num_input_tokens, row.num_cached_tokens, row.num_output_tokens)
        assert (hop.num_input_tokens, hop.num_cached_tokens, hop.num_output_tokens) == counts
        assert hop.cost_usd is not None
        usd += hop.cost_usd
    assert event.cost_usd == pytest.approx(usd) and usd > 0


async def test_one_model_in_two_precisions(tmp_path: Path, embedded_model: ModelFiles) -> None:
    models = {
        "cheap": {"id": SMOL, "precision": "int8", "usd_per_mtok": {"input": 1, "cached_input": 0.5, "output": 4}},
        "strong": {"id": SMOL, "precision": "bf16", "usd_per_mtok": {"input": 5, "cached_input": 1, "output": 20}},
    }
    question = [{"role": "user", "content": "What is the capital of Germany?"}]
    async with service(tmp_path, models, ["invalid_json", {"low_logprob": -8.0}]) as client:
        sure = await (await post(client, "/v1/chat/completions", messages=question)).json()
        assert sure["model"] == "cheap" and "Berlin" in sure["choices"][0]["message"]["content"]
        assert sure["choices"][0]["logprobs"] is None, "asked for by the gateway alone"

        prose = await post(client, "/v1/chat/completions", "extract", messages=question)
        answer = await prose.json()
        assert answer["model"] == prose.header("x-inferloop-model") == "strong"
        assert prose.header("x-inferloop-failed-checks") == "invalid_json"

        schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
        wants = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
        kept = await post(
            client, "/v1/chat/completions", "extract", messages=question, response_format=wants, max_tokens=64
        )
        assert kept.header("x-inferloop-hops") == "1", "the grammar holds"
        assert isinstance(msgspec.json.decode((await kept.json())["choices"][0]["message"]["content"]), dict)
    events, replicas = told(tmp_path)
    for event, asked in zip(events, (["cheap"], ["cheap", "strong"], ["cheap"]), strict=True):
        assert_joined(event, replicas, asked)
    assert events[1].hops[0].identity_digest != events[1].hops[1].identity_digest


async def test_an_unsure_model_hands_over_to_gemma(tmp_path: Path, embedded_model: ModelFiles) -> None:
    """Gemma 3 270M is a base model without a chat template: it completes texts."""
    cache = os.environ.get("INFERLOOP_CACHE_DIR")
    if cached_path(known_models()[GEMMA], Path(cache) if cache else None) is None:
        pytest.skip("gemma3-270m has not been fetched")
    models = {"cheap": {"id": SMOL, "usd_per_mtok": 1}, "strong": {"id": GEMMA, "usd_per_mtok": 2}}
    async with service(tmp_path, models, [{"low_logprob": -0.05}]) as client:
        for stream in (False, True):
            prompt = "The capital of France is"
            response = await post(client, "/v1/completions", prompt=prompt, stream=stream)
            text = await response.read()
            assert response.header("x-inferloop-model") == "strong" and b'"model":"strong"' in text
            assert response.header("x-inferloop-failed-checks") == "low_logprob"
        chat = await post(client, "/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}])
        assert chat.status == 200 and (await chat.json())["model"] == "cheap"
        assert chat.header("x-inferloop-escalation-missed") == "http_400", "no template, no chat"
    events, replicas = told(tmp_path)
    for event in events[:2]:
        assert_joined(event, replicas, ["cheap", "strong"])
    assert [hop.delivered for hop in events[2].hops] == [True, False]

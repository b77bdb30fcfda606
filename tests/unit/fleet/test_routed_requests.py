"""Which model a request of a service with several is given to, and what is answered before any."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.fleet.gateways import CHAT, RESPONSES, Desk
from tests.unit.fleet.models import GOOD, JSON, TOOLS, refuses, says
from tests.unit.fleet.stubs import Asked, Handler, Talk, dies


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
        ({"model": "desk/code"}, {}, ["strong"]),
        ({"model": "desk/extract"}, {"x-inferloop-class": "code"}, ["cheap", "strong"]),
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
    told = body.get("model", "").partition("/")[2] or headers.get("x-inferloop-class")
    assert event.traffic_class == told
    for model in asked:
        assert desk.stubs[model].asked[0].headers.get("x-inferloop-class") == told
        assert desk.sent(model) | {"model": ""} == {"messages": [{"role": "user", "content": "?"}], **body, "model": ""}


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
    for name in ("gpt-9", "desk/extrakt", "desk/"):
        response = await desk.post(model=name)
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "desk, desk/code, desk/extract, desk/do, cheap, strong" in error["message"]


@pytest.mark.parametrize(
    "body", [b"{broken", b"", b"[]", b'{"model": 5}', b'{"model": "desk", "stream_options": 7, "stream": true}']
)
async def test_what_cannot_be_read_is_left_to_the_default_model(desk: Desk, body: bytes) -> None:
    await desk.open(cheap=refuses(400), strong=says(GOOD))
    response = await desk.client.request("POST", CHAT, body=body, headers=[], timeout_s=60)
    assert response.status == 400 and len(desk.stubs["cheap"].asked) == 1
    if b"desk" not in body:
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
        ("desk/code", None),
        ("desk/extract", 2048),
        ("desk/do", 2048),
        ("cheap", 2048),
        ("strong", None),
    ]
    for name in ("desk", "desk/extract"):
        for path in (name, name.replace("/", "%2F")):
            one = await (await desk.client.request("GET", f"/v1/models/{path}")).json()
            assert (one["id"], one["max_model_len"]) == (name, 2048)
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

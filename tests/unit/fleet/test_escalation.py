"""Answers that do not hold are asked for again: what fails which check, what the caller sees, what is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.fleet.gateways import COMPLETIONS, RESPONSES, Desk, escalating
from tests.unit.fleet.models import BROKEN, GOOD, JSON, SHAPE, TOOLS, said, says, usage
from tests.unit.fleet.stubs import Asked, Handler, Talk


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


async def test_a_call_of_a_tool_that_is_not_offered_is_escalated(desk: Desk) -> None:
    await desk.open(cheap=says("", calls={"later": "{}"}), strong=says("", calls={"now": "{}"}))
    for stream in (False, True):
        text = await (await desk.post(stream=stream, **TOOLS)).read()
        assert b'"now"' in text and b"later" not in text
        assert (await desk.event()).hops[0].failed_checks == ("refused_tool",)


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

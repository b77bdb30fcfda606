"""Calls of tools and reasoning through the `openai` package: a script plays the model, then the real one is made to
call. What streams must add up to what comes whole, wherever the text is cut."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from inferloop.backends.http import HttpClient
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.engine.text.answer import AnswerStyle
from inferloop.models.resolve import ModelFiles
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving

QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
TOOLS = [NOW, WEATHER]
NAMED = {"type": "function", "function": {"name": "now"}}
CALL_NOW = '<tool_call>{"name":"now","arguments":{}}</tool_call>'
CALL_OSLO = '<tool_call>{"name": "get_weather", "arguments": {"city": "삼 🌍"}}</tool_call>'
OSLO = ("get_weather", '{"city": "삼 🌍"}')


@dataclass(slots=True)
class Answer:
    """One choice; `usage` is of all of them."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str | None = None
    num_logprobs: int = 0
    usage: int = 0


@contextlib.asynccontextmanager
async def scripted(text: str, style: AnswerStyle | None = None) -> AsyncIterator[tuple[ScriptedGenerator, Any]]:
    generator = ScriptedGenerator(Script(ttft_ms=0, tpot_ms=0, text=text), model_id="m", answer_style=style)
    async with serving(build_app(generator, ServeConfig(), DropSink()), wait_ready=True) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        try:
            yield generator, client
        finally:
            await client.close()


async def whole(client: Any, model: str = "m", **fields: Any) -> list[Answer]:
    body = await client.chat.completions.create(model=model, messages=QUESTION, **fields)
    answers = []
    for choice in body.choices:
        calls, told = choice.message.tool_calls or [], choice.message.model_dump()
        assert choice.message.content is not None or calls or told.get("reasoning_content")
        assert all(call.id and call.type == "function" for call in calls)
        answers.append(
            Answer(
                choice.message.content or "",
                told.get("reasoning_content") or "",
                [(call.function.name, call.function.arguments) for call in calls],
                choice.finish_reason,
                len(choice.logprobs.content) if choice.logprobs else 0,
                body.usage.completion_tokens,
            )
        )
    return answers


async def streamed(client: Any, model: str = "m", **fields: Any) -> list[Answer]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answers: dict[int, Answer] = {}
    async for chunk in await client.chat.completions.create(model=model, messages=QUESTION, **options, **fields):
        for choice in chunk.choices:
            answer = answers.setdefault(choice.index, Answer())
            told = choice.delta.model_dump(exclude_unset=True)
            answer.content += told.get("content") or ""
            answer.reasoning += told.get("reasoning_content") or ""
            for piece in told.get("tool_calls") or ():
                collect(answer.calls, piece)
            answer.finish = choice.finish_reason or answer.finish
            answer.num_logprobs += len(choice.logprobs.content) if choice.logprobs else 0
        if chunk.usage:
            for answer in answers.values():
                answer.usage = chunk.usage.completion_tokens
    return [answers[i] for i in sorted(answers)]


def collect(calls: list[tuple[str, str]], piece: dict[str, Any]) -> None:
    """The first piece of a call has everything but its arguments, later ones have nothing else."""
    if piece["index"] == len(calls):
        assert piece["id"] and piece["type"] == "function" and piece["function"]["arguments"] == ""
        calls.append((piece["function"]["name"], ""))
    else:
        assert piece.keys() == {"index", "function"} and piece["function"].keys() == {"arguments"}
        name, arguments = calls[piece["index"]]
        calls[piece["index"]] = (name, arguments + piece["function"]["arguments"])


def cuts(text: str) -> Iterable[int]:
    return range(1, len(text.encode()) + 2)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", Answer(CALL_NOW, finish="stop")),
        ("auto", Answer(calls=[("now", "{}")], finish="tool_calls")),
        ("required", Answer(calls=[("now", "{}")], finish="tool_calls")),
        (NAMED, Answer(calls=[("now", "{}")], finish="stop")),
    ],
)
async def test_a_call_cut_anywhere(choice: Any, expected: Answer) -> None:
    expected.usage = len(CALL_NOW) + 1
    async with scripted(CALL_NOW) as (generator, client):
        for size in cuts(CALL_NOW):
            generator.script = replace(generator.script, tokens_per_chunk=size)
            assert await whole(client, tools=TOOLS, tool_choice=choice) == [expected]
            assert await streamed(client, tools=TOOLS, tool_choice=choice) == [expected]


async def test_text_and_several_calls_cut_anywhere() -> None:
    text = f"Ok 삼.\n{CALL_OSLO}\n{CALL_NOW}\n"
    async with scripted(text) as (generator, client):
        for size in cuts(text):
            generator.script = replace(generator.script, tokens_per_chunk=size)
            (answer,) = await streamed(client, tools=TOOLS)
            assert (answer.content, answer.calls, answer.finish) == ("Ok 삼.", [OSLO, ("now", "{}")], "tool_calls")
        assert await whole(client, tools=TOOLS) == [answer]
        (alone,) = await streamed(client, tools=TOOLS, parallel_tool_calls=False)
        assert alone.calls == [OSLO]
        (text_only,) = await streamed(client, tools=TOOLS, tool_choice="none")
        assert text_only.content == text


async def test_calls_cut_off_by_max_tokens_stay_text() -> None:
    text = f"Ok.\n{CALL_OSLO}"
    num_to_call = len(text.encode()) - len("</tool_call>")
    async with scripted(text) as (generator, client):
        for most in cuts(text):
            sent = text.encode()[:most].decode(errors="replace")
            for size in (1, 7):
                generator.script = replace(generator.script, tokens_per_chunk=size)
                fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": most, "logprobs": True}
                (answer,) = await streamed(client, **fields)
                assert await whole(client, **fields) == [answer]
                if most < num_to_call:
                    assert (answer.content, answer.calls, answer.finish) == (sent, [], "length")
                else:
                    assert (answer.content, answer.calls) == ("Ok.", [OSLO])
                    assert answer.finish == ("length" if most <= len(text.encode()) else "tool_calls")
                assert answer.usage == min(most, len(text.encode()) + 1)


async def test_choices_have_calls_and_logprobs_of_their_own() -> None:
    async with scripted(f"a{CALL_NOW}b") as (_, client):
        fields: dict[str, Any] = {"tools": TOOLS, "n": 3, "logprobs": True, "top_logprobs": 1}
        answers = await streamed(client, **fields)
        assert answers == await whole(client, **fields)
        num_tokens = len(CALL_NOW) + 3
        assert answers == [Answer("ab", "", [("now", "{}")], "tool_calls", num_tokens, 3 * num_tokens)] * 3


@pytest.mark.parametrize("opened", [False, True])
async def test_reasoning_cut_anywhere(opened: bool) -> None:
    text = f"{'' if opened else '<think>'}\nHm 삼 <b>\n</think>\n\nYes.{CALL_NOW}"
    async with scripted(text, AnswerStyle("hermes", thinks=True, think_opened=opened)) as (generator, client):
        for size in cuts(text):
            generator.script = replace(generator.script, tokens_per_chunk=size)
            (answer,) = await streamed(client, tools=TOOLS)
            assert (answer.reasoning, answer.content, answer.calls) == ("Hm 삼 <b>", "Yes.", [("now", "{}")])
        assert await whole(client, tools=TOOLS) == [answer]
        (cut,) = await whole(client, max_tokens=12)
        assert cut == (await streamed(client, max_tokens=12))[0] and not cut.content and cut.finish == "length"


async def test_a_loop_of_calls_and_results() -> None:
    """An answer goes back as the client has it, with results, and the next one comes."""
    async with scripted(f"{CALL_OSLO}{CALL_NOW}") as (_, client):
        body = await client.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS)
        message = body.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls]
        again = await client.chat.completions.create(model="m", messages=[*QUESTION, message, *results], tools=TOOLS)
        assert again.choices[0].message.tool_calls and again.usage.prompt_tokens > body.usage.prompt_tokens


@pytest.fixture
async def client(served_model: str) -> AsyncIterator[Any]:
    made = openai.AsyncOpenAI(base_url=f"{served_model}/v1", api_key="none", max_retries=0)
    yield made
    await made.close()


async def test_the_real_model_is_made_to_call(client: Any, embedded_model: ModelFiles) -> None:
    """Whatever is sampled, the arguments keep to the schema."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, finish in ((named, "stop"), ("required", "tool_calls")):
        fields = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
        for temperature in (0, 1.5):
            sampling = {"temperature": temperature, "seed": 3}
            (answer,) = await streamed(client, embedded_model.model_id, **fields, **sampling)
            assert (answer.content, answer.finish) == ("", finish)
            ((name, arguments),) = answer.calls
            given = json.loads(arguments)
            assert name == "get_weather" and list(given) == ["city", "unit"]
            assert len(given["city"]) <= 20 and given["unit"] in ("celsius", "fahrenheit")
            if temperature == 0:
                assert await whole(client, embedded_model.model_id, **fields, **sampling) == [answer]
    with pytest.raises(openai.BadRequestError) as refused:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
        await whole(client, embedded_model.model_id, tools=[tool], tool_choice="required")
    assert refused.value.param == "tools"


class Trip(BaseModel):
    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


async def test_calls_parse_into_the_clients_own_types(client: Any, embedded_model: ModelFiles) -> None:
    """Also by the client's own way of adding up a stream."""
    fields = {
        "model": embedded_model.model_id,
        "messages": QUESTION,
        "tools": [openai.pydantic_function_tool(Trip)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 4,
    }
    parsed = await client.chat.completions.parse(**fields)
    async with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    for completion in (parsed, final):
        (call,) = completion.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Trip)


async def test_the_real_model_is_told_of_tools(client: Any, embedded_model: ModelFiles, served_model: str) -> None:
    """Its template knows nothing of them: they take their place in the prompt all the same, and so do results."""
    plain = await client.chat.completions.create(model=embedded_model.model_id, messages=QUESTION, max_tokens=1)
    called = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "It rains."},
    ]
    told = await client.chat.completions.create(
        model=embedded_model.model_id, messages=history, tools=TOOLS, max_tokens=40, temperature=0
    )
    assert told.usage.prompt_tokens > plain.usage.prompt_tokens + 150
    http = HttpClient(served_model)
    counted = await http.request("POST", "/tokenize", body=json.dumps({"messages": history, "tools": TOOLS}).encode())
    assert (await counted.json())["count"] == told.usage.prompt_tokens
    await http.close()
    assert told.choices[0].finish_reason in ("stop", "length", "tool_calls")

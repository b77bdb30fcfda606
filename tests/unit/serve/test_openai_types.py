"""Every answer is what the openai package's types say, field by field: nothing missing, wrong or unknown to them."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from openai.types import Completion, CompletionChoice, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from inferloop.backends.http import HttpClient
from inferloop.backends.protocols import Delta, GeneratorInfo
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.core.errors import EngineError, InferloopError, RequestError
from inferloop.engine.text.answer import AnswerStyle
from inferloop.models.identity import ServingIdentity
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.errors import cut_short
from inferloop.serve.replies import CachedTokens, Timings, Usage
from inferloop.serve.responses.encode import ResponseEncoder
from inferloop.serve.responses.wire import parse_response
from inferloop.serve.run import serving
from inferloop.serve.sse import AnswerHead


class UnfinishedChoice(CompletionChoice):
    """OpenAI's own chunks have null until the end, which its type leaves out."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class CompletionChunk(Completion):
    choices: list[UnfinishedChoice]  # type: ignore[assignment]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
FUNCTION = {"name": "now", "description": "d", "parameters": {"type": "object", "properties": {}}}
TEXT = 'Größe 世界 <tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
SEVERAL = {"n": 2, "max_tokens": 5}
INCLUDE = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
ASKED: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("/v1/chat/completions", CHAT, ChatCompletion, ChatCompletionChunk),
    (
        "/v1/chat/completions",
        {**CHAT, **SEVERAL, "logprobs": True, "top_logprobs": 1},
        ChatCompletion,
        ChatCompletionChunk,
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]},
        ChatCompletion,
        ChatCompletionChunk,
    ),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}, Response, ResponseStreamEvent),
    ("/v1/completions", {"prompt": "hi"}, Completion, CompletionChunk),
    ("/v1/completions", {"prompt": ["hi", "ho"], **SEVERAL, "logprobs": 1}, Completion, CompletionChunk),
    ("/v1/responses", {"input": "hi"}, Response, ResponseStreamEvent),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 3, **INCLUDE},
        Response,
        ResponseStreamEvent,
    ),
]
NOT_IN_THE_PACKAGE = {
    "stop_reason",  # which vLLM has, and tells which stop string or token id it was
    "store",  # which OpenAI's own responses have
    "bytes",  # of log-probabilities in a stream of responses, which OpenAI's own have too
}


def unknown_fields(value: Any, where: str = "") -> list[str]:
    """Paths of what the package's types do not know."""
    if isinstance(value, BaseModel):
        extra = [f"{where}.{name}" for name in value.model_extra or {}]
        own = [(f"{where}.{name}", getattr(value, name)) for name in type(value).model_fields]
        return extra + [found for path, item in own for found in unknown_fields(item, path)]
    if isinstance(value, list):
        return [found for item in value for found in unknown_fields(item, f"{where}[]")]
    return []


@functools.cache
def adapter(type_: Any) -> TypeAdapter[Any]:
    """Which takes a fifth of a second to make for the events of a response."""
    return TypeAdapter(type_)


def check(type_: Any, data: str | bytes) -> None:
    """As JSON and strictly: a number is no text, nor the other way round."""
    unknown = unknown_fields(adapter(type_).validate_json(data, strict=True))
    assert {path.rpartition(".")[2] for path in unknown} <= NOT_IN_THE_PACKAGE, unknown


@pytest_asyncio.fixture
async def client() -> AsyncIterator[HttpClient]:
    generator = ScriptedGenerator(Script(ttft_ms=1, tpot_ms=0, text=TEXT), model_id="m")
    async with serving(build_app(generator, ServeConfig(), DropSink())) as url:
        client = HttpClient(url)
        yield client
        await client.close()


@pytest.mark.parametrize(("path", "body", "whole", "_"), ASKED)
async def test_whole_answers(client: HttpClient, path: str, body: dict[str, Any], whole: Any, _: Any) -> None:
    answer = await client.request("POST", path, body=json.dumps({"model": "m", **body}).encode())
    data = await answer.read()
    assert answer.status == 200, data
    check(whole, data)


@pytest.mark.parametrize(("path", "body", "_", "chunk"), ASKED)
async def test_streamed_answers(client: HttpClient, path: str, body: dict[str, Any], _: Any, chunk: Any) -> None:
    asked = {"model": "m", **body, "stream": True}
    if path != "/v1/responses":
        asked["stream_options"] = {"include_usage": True}
    answer = await client.request("POST", path, body=json.dumps(asked).encode())
    lines = (await answer.read()).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    assert answer.status == 200 and len(data) > 4
    for line in data:
        check(chunk, line)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "{}"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
            "{}",
        ),
        ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "f"}}, ""),
        ({"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}, ""),
        ({"metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k", "safety_identifier": "s"}, "hi"),
        ({}, "<think>hm</think>hi"),
    ],
)
def test_what_a_response_repeats_is_known_to_the_package_too(asked: dict[str, Any], text: str) -> None:
    identity = ServingIdentity("m", "w", "p", "e", "1", "t", "c")
    style = AnswerStyle("hermes", thinks=True)
    info = GeneratorInfo("m", 1000, identity, 500, structured_output=True, answer_style=style)
    call = parse_response(json.dumps({"model": "m", "input": "hi", **asked}).encode(), info)
    usage = Usage(
        prompt_tokens=1, completion_tokens=1, total_tokens=2, prompt_tokens_details=CachedTokens(cached_tokens=0)
    )
    for stream in (False, True):
        encoder = ResponseEncoder(AnswerHead("resp_1", 0, "m", call, False, lambda _: b""))
        delta = Delta(text, (1,), 0, finish_reason="stop")
        if stream:
            sent = (
                encoder.opening(delta)
                + encoder.chunk(0, delta)
                + encoder.closing(0, "stop", usage, Timings(num_tokens=1))
            )
            for line in sent.decode().splitlines():
                if line.startswith("data: "):
                    check(ResponseStreamEvent, line.removeprefix("data: "))
        else:
            encoder.collect(0, delta)
            check(Response, encoder.body(["stop"], usage, Timings(num_tokens=1)))


@pytest.mark.parametrize(
    ("error", "code", "type_", "param"),
    [
        (RequestError("no", param="text.format"), "invalid_prompt", "invalid_request_error", "text.format"),
        (EngineError("no"), "server_error", "server_error", None),
        (cut_short("cancelled"), "server_error", "request_ended_error", None),
        (ValueError("secret"), "server_error", "server_error", None),
    ],
)
def test_what_broke_a_response_is_told(error: InferloopError, code: str, type_: str, param: str | None) -> None:
    identity = ServingIdentity("m", "w", "p", "e", "1", "t", "c")
    call = parse_response(b'{"model":"m","input":"hi","stream":true}', GeneratorInfo("m", 1000, identity, 500))
    encoder = ResponseEncoder(AnswerHead("resp_1", 0, "m", call, False, lambda _: b""))
    encoder.opening(Delta("a", (1,), 0))
    encoder.chunk(0, Delta("a", (1,), 0))
    kind, _, data = encoder.broken(error).decode().partition("\ndata: ")
    check(ResponseStreamEvent, data)
    told = json.loads(data)["response"]
    assert (kind, told["status"], told["output"][0]["status"]) == ("event: response.failed", "failed", "incomplete")
    assert (told["error"]["code"], told["error"]["type"], told["error"]["param"]) == (code, type_, param)
    assert "secret" not in data


async def test_models(client: HttpClient) -> None:
    for model in (await client.get_json("/v1/models"))["data"]:
        unknown = unknown_fields(Model.model_validate(model))
        assert unknown == [".max_model_len", ".identity_digest"], "vLLM's extension, and ours"


class Now(BaseModel):
    """A function's arguments."""

    zone: str


@pytest.mark.parametrize("calls", [True, False])
async def test_what_the_packages_helpers_give_can_be_sent_back(calls: bool) -> None:
    """As objects and as plain dictionaries; the helpers add what they read into our answer."""
    call = '<tool_call>\n{"name": "Now", "arguments": {"zone": "é"}}\n</tool_call>'
    generator = ScriptedGenerator(Script(ttft_ms=0, tpot_ms=0, text=f"Well. {call}" if calls else TEXT), model_id="m")
    user: Any = {"role": "user", "content": "hi"}
    tools: Any = [openai.pydantic_function_tool(Now)]
    flat: Any = [
        {"type": "function", "strict": True, **{k: v for k, v in tools[0]["function"].items() if k != "strict"}}
    ]
    async with serving(build_app(generator, ServeConfig(), DropSink())) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        message = (await client.chat.completions.parse(model="m", messages=[user], tools=tools)).choices[0].message
        assert bool(message.tool_calls) is calls
        results: list[Any] = [
            {"role": "tool", "tool_call_id": told.id, "content": "5"} for told in message.tool_calls or ()
        ]
        sent: list[Any] = [message, message.model_dump()]
        for turn in sent:
            await client.chat.completions.create(model="m", messages=[user, turn, *results])
        output = (await client.responses.parse(model="m", input="hi", tools=flat)).output
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
            for item in output
            if item.type == "function_call"
        ]
        turns: list[Any] = [output, [item.model_dump() for item in output]]
        for items in turns:
            await client.responses.create(model="m", input=[user, *items, *results])
        await client.close()

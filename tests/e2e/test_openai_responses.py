"""`client.responses` of the `openai` package, unchanged, against our server with the real model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import FunctionToolParam, ResponseInputItemParam, ToolChoiceFunctionParam
from pydantic import BaseModel, Field

from inferloop.models.resolve import ModelFiles

QUESTION = "What is the capital of Germany?"
BRIEF = "Answer in one short sentence."


@pytest.fixture
async def client(served_model: str) -> AsyncIterator[openai.AsyncOpenAI]:
    made = openai.AsyncOpenAI(base_url=f"{served_model}/v1", api_key="none", max_retries=0)
    yield made
    await made.close()


@pytest.fixture
def model(embedded_model: ModelFiles) -> str:
    return embedded_model.model_id


async def test_whole_and_streamed_answer_as_the_chat_does(client: openai.AsyncOpenAI, model: str) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": BRIEF},
        {"role": "user", "content": QUESTION},
    ]
    chat = await client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=24)
    whole = await client.responses.create(
        model=model, instructions=BRIEF, input=QUESTION, temperature=0, max_output_tokens=24
    )
    assert whole.output_text == chat.choices[0].message.content and whole.output_text
    assert whole.status == ("completed" if chat.choices[0].finish_reason == "stop" else "incomplete")
    assert whole.usage is not None and chat.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert 0 < whole.usage.input_tokens_details.cached_tokens < whole.usage.input_tokens

    raw = await client.responses.create(
        model=model, instructions=BRIEF, input=QUESTION, temperature=0, max_output_tokens=24, stream=True
    )
    events = [event async for event in raw]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.completed" or last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text and last.response.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens


async def test_a_conversation_goes_on_with_the_answer_as_it_came(client: openai.AsyncOpenAI, model: str) -> None:
    first = await client.responses.create(model=model, input=QUESTION, temperature=0)
    assert first.status == "completed"
    asked: list[ResponseInputItemParam] = [{"role": "user", "content": QUESTION}]
    asked += [item.to_dict() for item in first.output]  # type: ignore[misc]
    asked.append({"role": "user", "content": [{"type": "input_text", "text": "And of Italy?"}]})
    async with client.responses.stream(model=model, input=asked, temperature=0) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        second = await stream.get_final_response()
    assert second.output_text == "".join(deltas) != ""
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0, "the first turn was computed before"


class Item(BaseModel):
    name: str = Field(max_length=15)
    color: Literal["red", "blue"]


class Order(BaseModel):
    items: list[Item] = Field(min_length=1, max_length=2)
    paid: bool


async def test_answers_parse_into_the_clients_own_types(client: openai.AsyncOpenAI, model: str) -> None:
    whole = await client.responses.parse(
        model=model, input="Order something.", text_format=Order, temperature=0, max_output_tokens=300
    )
    assert isinstance(whole.output_parsed, Order)
    async with client.responses.stream(
        model=model, input="Order something.", text_format=Order, temperature=0, max_output_tokens=300
    ) as stream:
        streamed = await stream.get_final_response()
    assert isinstance(streamed.output_parsed, Order)


async def test_logprobs_and_incomplete(client: openai.AsyncOpenAI, model: str) -> None:
    told = await client.responses.create(
        model=model,
        input=QUESTION,
        temperature=0,
        max_output_tokens=3,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert told.status == "incomplete"
    assert told.incomplete_details is not None and told.incomplete_details.reason == "max_output_tokens"
    [item] = told.output
    assert item.type == "message"
    [part] = item.content
    assert part.type == "output_text" and part.logprobs is not None and len(part.logprobs) == 3
    assert "".join(row.token for row in part.logprobs) == part.text
    for row in part.logprobs:
        assert row.logprob == pytest.approx(row.top_logprobs[0].logprob)


async def test_a_call_and_what_it_gave(client: openai.AsyncOpenAI, model: str) -> None:
    """The call is forced, so that its arguments keep to the schema whatever the model; then it is told the result."""
    tool: FunctionToolParam = {
        "type": "function",
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
        "strict": True,
    }
    choice: ToolChoiceFunctionParam = {"type": "function", "name": "get_weather"}
    asked: list[ResponseInputItemParam] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = await client.responses.create(
        model=model, input=asked, tools=[tool], tool_choice=choice, temperature=0, max_output_tokens=100
    )
    [call] = first.output
    assert call.type == "function_call" and call.name == "get_weather" and first.status == "completed"
    assert json.loads(call.arguments)["unit"] in ("celsius", "fahrenheit")
    async with client.responses.stream(
        model=model, input=asked, tools=[tool], tool_choice=choice, temperature=0, max_output_tokens=100
    ) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.function_call_arguments.delta"]
        [streamed] = (await stream.get_final_response()).output
    assert streamed.type == "function_call" and streamed.arguments == "".join(deltas)
    assert list(json.loads(streamed.arguments)) == ["city", "unit"]
    asked += [item.to_dict() for item in first.output]  # type: ignore[misc]
    asked.append({"type": "function_call_output", "call_id": call.call_id, "output": "It rains."})
    second = await client.responses.create(
        model=model, input=asked, tools=[tool], tool_choice="none", temperature=0, max_output_tokens=8
    )
    assert second.output_text and second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 20


async def test_what_would_need_a_memory_is_refused_by_name(client: openai.AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=model, input="x", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.responses.create(model=model, input="x", max_output_tokens=10**6)
    assert (too_long.value.param, too_long.value.code) == ("max_output_tokens", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")

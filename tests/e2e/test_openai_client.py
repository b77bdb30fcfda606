"""The `openai` package, unchanged, against our server with the real model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from inferloop.backends.http import HttpClient
from inferloop.models.resolve import ModelFiles

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of Germany?"}]


@pytest.fixture
async def client(served_model: str) -> AsyncIterator[openai.AsyncOpenAI]:
    made = openai.AsyncOpenAI(base_url=f"{served_model}/v1", api_key="none", max_retries=0)
    yield made
    await made.close()


@pytest.fixture
def model(embedded_model: ModelFiles) -> str:
    return embedded_model.model_id


async def test_models(client: openai.AsyncOpenAI, model: str) -> None:
    assert [m.id async for m in client.models.list()] == [model]
    assert (await client.models.retrieve(model)).id == model


async def test_chat_whole_and_streamed(client: openai.AsyncOpenAI, model: str) -> None:
    whole = await client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24)
    assert whole.choices[0].message.role == "assistant"
    text = whole.choices[0].message.content
    assert text is not None and "Berlin" in text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    cached = whole.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and 0 <= cached < whole.usage.prompt_tokens

    stream = await client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None and not chunks[-1].choices
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


async def test_usage_is_exact(client: openai.AsyncOpenAI, model: str, served_model: str) -> None:
    plain = HttpClient(served_model)
    told = await plain.request("POST", "/tokenize", body=json.dumps({"messages": QUESTION}).encode())
    counted = (await told.json())["count"]
    await plain.close()
    answer = await client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=3)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (counted, 3)
    assert answer.usage.total_tokens == counted + 3
    assert answer.choices[0].finish_reason == "length"


async def test_completions_and_stop(client: openai.AsyncOpenAI, model: str) -> None:
    prompt = "Here is the English alphabet: A B C D"
    full = await client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=16)
    assert " F G" in full.choices[0].text
    for stop in ("F G", ["zzz", "F"]):
        stopped = await client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=16, stop=stop)
        expected = full.choices[0].text.split("F")[0]
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (expected, "stop")
        stream = await client.completions.create(
            model=model, prompt=prompt, temperature=0, max_tokens=16, stop=stop, stream=True
        )
        assert "".join([c.choices[0].text async for c in stream]) == expected


async def test_several_choices(client: openai.AsyncOpenAI, model: str) -> None:
    """With a seed, choices differ, the same request gives the same ones, and the first is that of a single choice."""
    ask = {"model": model, "prompt": "Once upon a time", "seed": 11, "temperature": 1.0, "max_tokens": 8}
    one = await client.completions.create(**ask)  # type: ignore[call-overload]
    three = await client.completions.create(**ask, n=3)  # type: ignore[call-overload]
    again = await client.completions.create(**ask, n=3)  # type: ignore[call-overload]
    texts = [choice.text for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[0] == one.choices[0].text
    assert [choice.text for choice in again.choices] == texts
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 24


async def test_several_prompts_echoed(client: openai.AsyncOpenAI, model: str) -> None:
    prompts = ["Here is the English alphabet: A B C D", "1 2 3 4 5"]
    alone = [
        await client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=6) for prompt in prompts
    ]
    both = await client.completions.create(model=model, prompt=prompts, temperature=0, max_tokens=6, echo=True, n=2)
    expected = [prompt + answer.choices[0].text for prompt, answer in zip(prompts, alone, strict=True) for _ in "ab"]
    assert [choice.text for choice in both.choices] == expected
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone if answer.usage)
    assert both.usage.completion_tokens == 24


async def test_two_choices_streamed(client: openai.AsyncOpenAI, model: str) -> None:
    whole = await client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24, n=2)
    stream = await client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usages = ["", ""], ["", ""], []
    async for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices] and "Berlin" in texts[0] == texts[1]
    assert reasons == ["stop", "stop"]
    assert len(usages) == 1 and whole.usage is not None
    assert usages[0].completion_tokens == whole.usage.completion_tokens


async def test_logprobs(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 5
    for row in logprobs.content:
        assert len(row.top_logprobs) == 3
        # greedy: the chosen token is the most likely one, also where two are level
        assert row.logprob == pytest.approx(row.top_logprobs[0].logprob)
    assert "".join(row.token for row in logprobs.content) == answer.choices[0].message.content


async def test_errors_are_the_clients_own_types(client: openai.AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=model, messages=QUESTION, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as tools:
        await client.chat.completions.create(
            model=model, messages=QUESTION, tools=[{"type": "function", "function": {"name": "two words"}}]
        )
    assert tools.value.param == "tools[0].function.name"


async def test_request_id_is_on_the_answer(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await client.completions.create(
        model=model, prompt="x", max_tokens=1, extra_headers={"x-request-id": "abc-123"}
    )
    assert answer._request_id == "abc-123"


class Item(BaseModel):
    name: str = Field(max_length=15)
    size: int | None
    color: Literal["red", "blue"]


class Order(BaseModel):
    items: list[Item] = Field(min_length=1, max_length=2)
    paid: bool


async def test_answers_parse_into_the_clients_own_types(client: openai.AsyncOpenAI, model: str) -> None:
    whole = await client.chat.completions.parse(
        model=model, messages=QUESTION, response_format=Order, max_tokens=300, seed=1
    )
    assert isinstance(whole.choices[0].message.parsed, Order)
    async with client.chat.completions.stream(
        model=model, messages=QUESTION, response_format=Order, max_tokens=300, seed=1
    ) as stream:
        streamed = await stream.get_final_completion()
    assert isinstance(streamed.choices[0].message.parsed, Order)

"""Scoring prompts and embedding texts with the real model, through the `openai` package, unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import numpy as np
import openai
import pytest

from inferloop.models.resolve import ModelFiles

SHARED = (
    "Water boils at one hundred degrees at the level of the sea, and the higher one climbs the earlier it boils. " * 6
)


@pytest.fixture
async def client(served_model: str) -> AsyncIterator[openai.AsyncOpenAI]:
    made = openai.AsyncOpenAI(base_url=f"{served_model}/v1", api_key="none", max_retries=0)
    yield made
    await made.close()


@pytest.fixture
def model(embedded_model: ModelFiles) -> str:
    return embedded_model.model_id


async def scores(client: openai.AsyncOpenAI, model: str, prompt: str) -> list[float]:
    """Of the prompt's tokens from the second on."""
    answer = await client.completions.create(
        model=model, prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith(prompt) and choice.logprobs is not None and answer.usage is not None
    logprobs = choice.logprobs
    assert logprobs.token_logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert len(logprobs.token_logprobs) == answer.usage.prompt_tokens + 1
    assert str(logprobs.token_logprobs[0]) == "None", (
        "nothing comes before it, which the client's type does not foresee"
    )
    assert "".join(logprobs.tokens) == choice.text
    assert [choice.text[o:][: len(t)] for o, t in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == (
        logprobs.tokens
    )
    return logprobs.token_logprobs[1:-1]


async def test_scores_of_a_prompt_do_not_depend_on_the_cache(client: openai.AsyncOpenAI, model: str) -> None:
    cold, again = [await scores(client, model, SHARED) for _ in range(2)]
    half = await scores(client, model, SHARED[: len(SHARED) // 2] + " But why?")
    assert len(cold) > 120
    # bf16, and a batch of another shape may round otherwise
    assert again == pytest.approx(cold, abs=0.2)
    num = len(half) - 8
    assert half[:num] == pytest.approx(cold[:num], abs=0.2)
    assert np.mean(cold[-60:]) > -0.5 > np.mean(cold[:20]), "what repeats is no surprise"


async def test_scoring_tells_the_likelier_continuation(client: openai.AsyncOpenAI, model: str) -> None:
    context = "The capital of France is"
    prompts = [context + ending for ending in (" Paris", " banana")]
    answer = await client.completions.create(model=model, prompt=prompts, echo=True, logprobs=0, max_tokens=0)
    assert [choice.text for choice in answer.choices] == prompts
    values = [choice.logprobs.token_logprobs for choice in answer.choices if choice.logprobs is not None]
    likely, unlikely = [values[0] or [], values[1] or []]
    assert likely[-1] > unlikely[len(likely) - 1] + 3
    assert answer.usage is not None and answer.usage.completion_tokens == 0


async def test_token_ids_are_those_of_the_tokenizer(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await client.completions.create(
        model=model, prompt="1 2 3", max_tokens=8, temperature=0, extra_body={"return_token_ids": True}
    )
    extra = answer.choices[0].model_extra or {}
    again = await client.completions.create(
        model=model, prompt=[*extra["prompt_token_ids"], *extra["token_ids"]], max_tokens=0, echo=True
    )
    assert again.choices[0].text == "1 2 3" + answer.choices[0].text


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    return float(np.dot(a, b))


async def test_embeddings(client: openai.AsyncOpenAI, model: str) -> None:
    texts = [
        "The cat sleeps on the warm sofa in the living room.",
        "A kitten is napping on the couch at home.",
        "The central bank raised its interest rates to fight inflation.",
    ]
    answer = await client.embeddings.create(model=model, input=texts)
    vectors = [entry.embedding for entry in answer.data]
    assert all(len(vector) == 576 and cosine(vector, vector) == pytest.approx(1, abs=1e-5) for vector in vectors)
    assert cosine(vectors[0], vectors[1]) > cosine(vectors[0], vectors[2])
    assert cosine(vectors[0], vectors[1]) > cosine(vectors[1], vectors[2])
    alone = await client.embeddings.create(model=model, input=texts[0], encoding_format="float")
    assert cosine(alone.data[0].embedding, vectors[0]) > 0.999
    assert alone.usage.prompt_tokens == alone.usage.total_tokens > 10
    with pytest.raises(openai.BadRequestError) as refused:
        await client.embeddings.create(model=model, input=["fine", "too long " * 20_000])
    assert (refused.value.param, refused.value.code) == ("input[1]", "context_length_exceeded")

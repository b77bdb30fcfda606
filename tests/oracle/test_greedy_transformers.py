"""Greedy answers of the real model equal those of transformers, token for token, however they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inferloop.core.request import Sampling

Prompts = list[tuple[int, ...]]
Generate = Callable[..., list[list[int]]]


def test_alone(generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]]) -> None:
    assert generate(prompts, options(deterministic=False, max_sequences=1)) == reference


@pytest.mark.parametrize("chunk", [256, 64])
def test_in_a_batch_of_eight(
    chunk: int, generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]]
) -> None:
    assert generate(prompts, options(max_step_tokens=chunk)) == reference


def test_in_chunks_of_seven(
    generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]], full: bool
) -> None:
    """The budget of a step is seven tokens, so eight sequences take turns and prompts wait for gaps."""
    some = range(0, len(prompts), 1 if full else 3)
    got = generate([prompts[i] for i in some], options(max_step_tokens=7))
    assert got == [reference[i] for i in some]


def test_one_token_at_a_time(
    generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]], full: bool
) -> None:
    few = [i for i, prompt in enumerate(prompts) if full or len(prompt) < 12][: None if full else 4]
    num_new = 64 if full else 24
    assert len(few) >= 4
    got = generate([prompts[i] for i in few], options(max_step_tokens=1), Sampling(temperature=0.0, max_tokens=num_new))
    assert got == [reference[i][:num_new] for i in few]


def test_with_preemption(generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]]) -> None:
    preempted: list[int] = []
    got = generate(prompts, options(num_blocks=20), preempted=preempted)
    assert got == reference
    assert preempted[0] > 0


def test_from_cached_beginnings(
    generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]], full: bool
) -> None:
    """One after the other: cold, then from the cache; another prompt meets what it has in common with the first."""
    long = [i for i, prompt in enumerate(prompts) if len(prompt) > 16][: None if full else 2]
    num_new = 64 if full else 16
    asked = [i for i in long for _ in range(2)]
    cached: dict[int, int] = {}
    sampling = Sampling(temperature=0.0, max_tokens=num_new)
    got = generate([prompts[i] for i in asked], options(max_sequences=1), sampling, cached=cached)
    assert got == [reference[i][:num_new] for i in asked]
    assert cached[0] == 0
    assert all(cached[n] >= (len(prompts[i]) - 1) // 16 * 16 for n, i in enumerate(asked) if n % 2)

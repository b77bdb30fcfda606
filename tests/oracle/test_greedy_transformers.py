"""Greedy answers of the real model equal those of transformers, token for token, however they are computed.

Sums in another order may settle a tie the other way, so an answer may leave the reference's where that itself all but
hesitates; position and margin are logged then, and anything else fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inferloop.core.request import Sampling

Prompts = list[tuple[int, ...]]
Generate = Callable[..., list[list[int]]]
AssertSame = Callable[..., None]
FP32_TIE = 1e-3
"""Logits this close are equal for all that fp32 can tell; no answer has needed it so far."""
BF16_TIE = 0.25
"""Logits near 20 are 0.125 apart in bf16. Of 20 answers, 8 left the reference, at 0.11 at most."""


def test_alone(
    generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]], assert_same: AssertSame
) -> None:
    got = generate(prompts, options(deterministic=False, max_sequences=1))
    assert_same(prompts, got, reference, FP32_TIE)


def test_bf16_leaves_fp32_at_near_ties_only(
    generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]], full: bool, assert_same: AssertSame
) -> None:
    some = range(0, len(prompts), 1 if full else 3)
    got = generate([prompts[i] for i in some], options(dtype="bf16", deterministic=False))
    assert_same([prompts[i] for i in some], got, [reference[i] for i in some], BF16_TIE)


@pytest.mark.parametrize("chunk", [256, 64])
def test_in_a_batch_of_eight(
    chunk: int,
    generate: Generate,
    options: Any,
    prompts: Prompts,
    reference: list[list[int]],
    assert_same: AssertSame,
) -> None:
    assert_same(prompts, generate(prompts, options(max_step_tokens=chunk)), reference, FP32_TIE)


def test_in_chunks_of_seven(
    generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]], full: bool, assert_same: AssertSame
) -> None:
    """The budget of a step is seven tokens, so eight sequences take turns and prompts wait for gaps."""
    some = range(0, len(prompts), 1 if full else 3)
    got = generate([prompts[i] for i in some], options(max_step_tokens=7))
    assert_same([prompts[i] for i in some], got, [reference[i] for i in some], FP32_TIE)


def test_one_token_at_a_time(
    generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]], full: bool, assert_same: AssertSame
) -> None:
    few = [i for i, prompt in enumerate(prompts) if full or len(prompt) < 12][: None if full else 4]
    num_new = 64 if full else 24
    assert len(few) >= 4
    got = generate([prompts[i] for i in few], options(max_step_tokens=1), Sampling(temperature=0.0, max_tokens=num_new))
    assert_same([prompts[i] for i in few], got, [reference[i][:num_new] for i in few], FP32_TIE)


def test_with_preemption(
    generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]], assert_same: AssertSame
) -> None:
    preempted: list[int] = []
    got = generate(prompts, options(num_blocks=20), preempted=preempted)
    assert_same(prompts, got, reference, FP32_TIE)
    assert preempted[0] > 0


def test_from_cached_beginnings(
    generate: Generate, options: Any, prompts: Prompts, reference: list[list[int]], full: bool, assert_same: AssertSame
) -> None:
    """One after the other: cold, then from the cache; another prompt meets what it has in common with the first."""
    long = [i for i, prompt in enumerate(prompts) if len(prompt) > 16][: None if full else 2]
    num_new = 64 if full else 16
    asked = [i for i in long for _ in range(2)]
    cached: dict[int, int] = {}
    sampling = Sampling(temperature=0.0, max_tokens=num_new)
    got = generate([prompts[i] for i in asked], options(max_sequences=1), sampling, cached=cached)
    assert_same([prompts[i] for i in asked], got, [reference[i][:num_new] for i in asked], FP32_TIE)
    assert cached[0] == 0
    assert all(cached[n] >= (len(prompts[i]) - 1) // 16 * 16 for n, i in enumerate(asked) if n % 2)


def test_an_answer_that_is_no_near_tie_fails_with_position_and_margin(
    prompts: Prompts, reference: list[list[int]], assert_same: AssertSame, caplog: pytest.LogCaptureFixture
) -> None:
    """A check that could not fail would be none: another token, and an answer that ends early."""
    wrong = [*reference[0][:5], (reference[0][5] + 1) % 1000, *reference[0][6:]]
    with pytest.raises(AssertionError, match=r"answer token 5.* top-2 margin \d"):
        assert_same(prompts[:1], [wrong], reference[:1], BF16_TIE)
    with pytest.raises(AssertionError, match="answer token 5: None instead of"):
        assert_same(prompts[:1], [reference[0][:5]], reference[:1], BF16_TIE)
    assert len(caplog.records) == 2

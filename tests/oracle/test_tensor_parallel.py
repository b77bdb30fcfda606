"""The real model over two and three processes gives transformers' greedy answers: its 9 heads over 3 KV heads do not
divide by two, so that ranks have different shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from inferloop.core.request import Sampling
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.models.resolve import ModelFiles

Prompts = list[tuple[int, ...]]
LoadSplit = Callable[..., contextlib.AbstractContextManager[Any]]
Check = Callable[..., tuple[list[int], Scheduler]]
FP32_TIE = 1e-3
BF16_TIE = 0.25
"""As for one process; no answer in fp32 has needed it so far."""


@pytest.fixture
def check(
    drive: Any, assert_same: Any, prompts: Prompts, reference: list[list[int]], embedded_model: ModelFiles
) -> Check:
    """check(runner, which, num_new, **schedule) holds the answers to those prompts to the reference. Tells how many
    tokens of each came from the cache, and the scheduler."""

    def run(
        runner: Any, which: list[int], num_new: int, *, near_tie: float = FP32_TIE, **schedule: Any
    ) -> tuple[list[int], Scheduler]:
        sampling = Sampling(temperature=0.0, max_tokens=num_new)
        asked = [prompts[i] for i in which]
        specs = [SequenceSpec(str(n), prompt, sampling) for n, prompt in enumerate(asked)]
        updates, scheduler = drive(runner, specs, eos_token_ids=embedded_model.header.eos_token_ids, **schedule)
        got = [[token for update in come for token in update.token_ids] for come in updates]
        assert_same(asked, got, [reference[i][:num_new] for i in which], near_tie)
        return [come[-1].num_cached_tokens for come in updates], scheduler

    return run


def by_length(prompts: Prompts) -> list[int]:
    return sorted(range(len(prompts)), key=lambda i: len(prompts[i]))


def test_two_ranks_in_chunks_and_from_the_cache(
    embedded_model: ModelFiles, load_split: LoadSplit, check: Check, prompts: Prompts, full: bool
) -> None:
    short, long = by_length(prompts)[:2], by_length(prompts)[-1]
    some = range(0, len(prompts), 1 if full else 5)
    with load_split(embedded_model, TorchConfig(dtype="fp32", num_blocks=512), 2) as runner:
        check(runner, list(some), 64 if full else 16, max_step_tokens=64)
        check(runner, short, 8, max_step_tokens=7)
        check(runner, short, 4, max_step_tokens=1)
        cached, _ = check(runner, [long, long], 4, max_step_tokens=256, max_sequences=1)
    assert cached == [0, (len(prompts[long]) - 1) // 16 * 16]


def test_two_ranks_with_preemption(embedded_model: ModelFiles, load_split: LoadSplit, check: Check) -> None:
    """Three short texts that go on for long, each in one block at first."""
    with load_split(embedded_model, TorchConfig(dtype="fp32", num_blocks=6), 2) as runner:
        _, scheduler = check(runner, [1, 3, 7], 34, max_step_tokens=64)
    assert scheduler.num_preemptions > 0


def test_three_ranks(embedded_model: ModelFiles, load_split: LoadSplit, check: Check, full: bool) -> None:
    with load_split(embedded_model, TorchConfig(dtype="fp32", num_blocks=512), 3) as runner:
        check(runner, [0, 3, 8], 64 if full else 8, max_step_tokens=64)


def test_two_ranks_in_bf16(embedded_model: ModelFiles, load_split: LoadSplit, check: Check, full: bool) -> None:
    """Packed weights, and parts of sums that are rounded before they are added."""
    with load_split(embedded_model, TorchConfig(num_blocks=512), 2) as runner:
        check(runner, [0, 3, 8], 64 if full else 12, near_tie=BF16_TIE)

"""Deterministic mode: the same bits and the same sampled tokens, whoever else is in the batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from inferloop.core.request import Sampling
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.step import SamplingColumns, StepPlan
from inferloop.models.resolve import ModelFiles

Prompts = list[tuple[int, ...]]
Generate = Callable[..., list[list[int]]]
BLOCK = 16


def plan_of(parts: list[tuple[int, list[int], int]], num_blocks_each: int) -> StepPlan:
    """parts: (which sequence, its tokens in this step, the position of the first); sequence i owns a run of blocks."""
    n = len(parts)
    tables = [range(which * num_blocks_each, (which + 1) * num_blocks_each) for which, _, _ in parts]
    return StepPlan(
        step_id=1,
        slots=np.array([which for which, _, _ in parts], np.int32),
        offsets=np.cumsum([0, *(len(tokens) for _, tokens, _ in parts)]).astype(np.int32),
        token_ids=np.array([t for _, tokens, _ in parts for t in tokens], np.int32),
        first_positions=np.array([first for _, _, first in parts], np.int32),
        block_tables=(np.array([list(t) for t in tables], np.int32),),
        sample_rows=np.full(n, -1, np.int32),
        num_drafts=np.zeros(n, np.int32),
        sampling=SamplingColumns(
            temperature=np.zeros(n, np.float32),
            top_p=np.ones(n, np.float32),
            top_k=np.zeros(n, np.int32),
            min_p=np.zeros(n, np.float32),
            seed=np.zeros(n, np.uint64),
            num_logprobs=np.full(n, -1, np.int32),
        ),
    )


def test_logits_have_the_same_bits_in_every_batch_and_chunking(embedded_model: ModelFiles) -> None:
    config = TorchConfig(dtype="fp32", deterministic=True, num_blocks=64, block_size=BLOCK)
    runner = TorchRunner.load(embedded_model, config)
    rng = random.Random(2)
    length, num_sequences = 40, 12
    texts = [[rng.randrange(runner.info.vocab_size) for _ in range(length)] for _ in range(num_sequences)]
    truth = [runner.logits(plan_of([(i, text, 0)], 4)) for i, text in enumerate(texts)]
    for _ in range(3):
        done = [0] * num_sequences
        found: list[list[torch.Tensor]] = [[] for _ in texts]
        while min(done) < length:
            going = [i for i in range(num_sequences) if done[i] < length and rng.random() < 0.7]
            rng.shuffle(going)
            parts = [(i, texts[i][done[i] : done[i] + rng.choice([1, 1, 3, 17])], done[i]) for i in going]
            if not parts:
                continue
            rows = runner.logits(plan_of(parts, 4)).split([len(tokens) for _, tokens, _ in parts])  # type: ignore[no-untyped-call]
            for (i, tokens, _), logits in zip(parts, rows, strict=True):
                found[i].append(logits)
                done[i] += len(tokens)
        for i in range(num_sequences):
            assert torch.equal(torch.cat(found[i]), truth[i]), f"sequence {i}"


def test_seeded_answers_do_not_depend_on_company(generate: Generate, options: Any, prompts: Prompts) -> None:
    """Cold, warm and filtered draws; the same prompts alone, beside unseeded greedy mates, in chunks, preempted."""
    chosen = prompts[1:10:2]
    sampling = [
        Sampling(temperature=0.8, seed=42, max_tokens=32),
        Sampling(temperature=1.0, seed=42, max_tokens=32, top_p=0.9),
        Sampling(temperature=1.3, seed=7, max_tokens=32, top_k=40, min_p=0.02),
        Sampling(temperature=0.7, seed=-1, max_tokens=32, frequency_penalty=0.5, repetition_penalty=1.1),
        Sampling(temperature=0.0, max_tokens=32),
    ]
    alone = [generate([p], options(max_sequences=1), s)[0] for p, s in zip(chosen, sampling, strict=True)]
    assert generate(chosen, options(), sampling) == alone
    assert generate(chosen[::-1], options(max_step_tokens=7), sampling[::-1]) == alone[::-1]
    preempted: list[int] = []
    assert generate(chosen, options(num_blocks=4), sampling, preempted=preempted) == alone
    assert preempted[0] > 0
    other = generate(chosen[:1], options(), Sampling(temperature=0.8, seed=43, max_tokens=32))
    assert other != alone[:1]

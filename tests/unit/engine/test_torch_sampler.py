"""Sampling from logits: the filters, their order, penalties, and the law of the draw."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from inferloop.core.request import Sampling
from inferloop.engine.compute.philox import gumbel
from inferloop.engine.compute.torch.sampler import logprobs_of, sample, sample_rows
from inferloop.engine.schedule.columns import sampling_columns
from inferloop.engine.schedule.sequence import Sequence, SequenceSpec
from inferloop.engine.schedule.step import SamplingColumns, SparseRows, StepPlan

VOCAB = 64


def plan_of(n: int, *, drafts: list[int] | None = None, tokens: list[int] | None = None, **columns: Any) -> StepPlan:
    """n sequences with one known token (and their drafts) at position 10 each."""
    num_drafts = drafts or [0] * n
    offsets = np.cumsum([0, *(1 + d for d in num_drafts)]).astype(np.int32)
    defaults: dict[str, Any] = {
        "temperature": np.ones(n, np.float32),
        "top_p": np.ones(n, np.float32),
        "top_k": np.zeros(n, np.int32),
        "min_p": np.zeros(n, np.float32),
        "seed": np.arange(n, dtype=np.uint64),
        "num_logprobs": np.full(n, -1, np.int32),
    }
    return StepPlan(
        step_id=1,
        slots=np.arange(n, dtype=np.int32),
        offsets=offsets,
        token_ids=np.array(tokens if tokens is not None else [0] * int(offsets[-1]), np.int32),
        first_positions=np.full(n, 10, np.int32),
        block_tables=(np.zeros((n, 1), np.int32),),
        sample_rows=offsets[:-1].copy(),
        num_drafts=np.array(num_drafts, np.int32),
        sampling=SamplingColumns(**(defaults | columns)),
    )


def draw(logits: torch.Tensor, plan: StepPlan) -> list[int]:
    return [int(t) for t in sample(logits.clone(), plan, sample_rows(plan))[0]]


def random_logits(n: int, spread: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(4).normal(0, spread, (n, VOCAB)).astype(np.float32))


def test_a_plain_draw_is_gumbel_max_at_the_next_position() -> None:
    logits = random_logits(50)
    noise = gumbel(np.arange(50)[:, None], 11, np.arange(VOCAB)[None, :])
    expected = (logits.numpy() + noise).argmax(-1).tolist()
    assert draw(logits, plan_of(50)) == expected


def test_draws_follow_the_probabilities() -> None:
    num = 20_000
    logits = torch.zeros(num, 4)
    logits[:] = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    counts = np.bincount(draw(logits, plan_of(num)), minlength=4) / num
    assert counts == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.015)


def kept(logits: np.ndarray[Any, Any], **filters: float) -> set[int]:
    """Which tokens ever come out over many seeds."""
    num = 4000
    columns: dict[str, Any] = {k: np.full(num, v, np.int32 if k == "top_k" else np.float32) for k, v in filters.items()}
    rows = torch.from_numpy(np.tile(logits.astype(np.float32), (num, 1)))
    return set(draw(rows, plan_of(num, **columns)))


def test_filters_leave_what_they_should() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04]))
    assert kept(logits) == {0, 1, 2, 3, 4}
    assert kept(logits, top_k=2) == {0, 1}
    assert kept(logits, top_k=99) == {0, 1, 2, 3, 4}
    assert kept(logits, top_p=0.65) == {0, 1}
    assert kept(logits, top_p=0.75) == {0, 1, 2}
    assert kept(logits, top_p=1e-6) == {0}
    assert kept(logits, min_p=0.45) == {0, 1, 2}
    assert kept(logits, top_k=3, top_p=0.7) == {0, 1}, "top-p counts the probability that top-k left"


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-20, 1e-6])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=1, top_p=0.9)
    sequences = [Sequence(SequenceSpec("r", (1,), sampling), 0, 9, frozenset())]
    plan = plan_of(1)
    plan = replace(plan, sampling=sampling_columns(sequences, VOCAB))
    logits = random_logits(20)
    for row in logits:
        assert draw(row[None], plan) == [int(row.argmax())]


def test_top_p_counts_what_can_never_win() -> None:
    """Entries that are each hopeless are part of the whole all the same: they decide whether the second is needed."""
    num = 300
    logits = torch.full((num, 50_000), -19.5)
    logits[:, 0], logits[:, 1] = 0.0, -4.0
    tail = 49_998 * np.exp(-19.5)
    top_p = np.full(num, 1 / (1 + np.exp(-4.0) + tail / 2), np.float32)
    assert set(draw(logits, plan_of(num, top_p=top_p))) == {0, 1}


def test_more_logprobs_than_vocabulary_are_the_vocabulary() -> None:
    (found,) = logprobs_of(random_logits(1), torch.tensor([0]), [VOCAB + 1])
    assert found is not None and len(found.top) == VOCAB


def test_top_p_sees_beyond_the_first_thousand() -> None:
    flat = torch.zeros(400, 3000)
    plan = plan_of(400, top_p=np.full(400, 0.999, np.float32))
    assert max(draw(flat, plan)) > 1500


def test_greedy_and_random_rows_mix() -> None:
    logits = random_logits(6)
    temperature = np.array([0, 1, 0, 0.5, 0, 2], np.float32)
    got = draw(logits, plan_of(6, temperature=temperature))
    best = logits.argmax(-1).tolist()
    assert [got[i] for i in (0, 2, 4)] == [best[i] for i in (0, 2, 4)]
    alone = plan_of(1, temperature=temperature[5:], seed=np.array([5], np.uint64))
    assert draw(logits[5:], alone) == [got[5]]


def test_bias_mask_and_penalties() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 7], logits[:, 8] = 3.0, 2.5
    zero = np.zeros(4, np.float32)
    bias = SparseRows(np.array([0, 1, 1, 1, 1], np.int32), np.array([7], np.int32), np.array([-np.inf], np.float32))
    penalties = SparseRows(
        np.array([0, 0, 1, 2, 3], np.int32), np.array([7, 7, 7], np.int32), np.array([2, 0, 0], np.float32)
    )
    plan = plan_of(
        4,
        temperature=zero,
        bias=bias,
        penalties=penalties,
        presence=np.array([0, 0.1, 5, 0], np.float32),
        frequency=np.array([0, 0.3, 5, 0], np.float32),
        repetition=np.array([1, 1, 1, 1.5], np.float32),
    )
    ids, processed = sample(logits.clone(), plan, sample_rows(plan))
    assert ids.tolist() == [8, 8, 7, 8], "forbidden; counted twice; only in the prompt; repeated"
    assert processed[1, 7] == pytest.approx(3.0 - 0.1 - 2 * 0.3)
    assert processed[3, 7] == pytest.approx(2.0)


def test_a_mask_allows_its_own_rows_tokens_and_no_others() -> None:
    rows = np.random.default_rng(8).integers(0, 2**32, (6, -(-VOCAB // 32)), dtype=np.uint32)
    allowed = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little", count=VOCAB).astype(bool)
    logits = random_logits(6)
    mask: Future[Any] = Future()
    mask.set_result(rows)
    plan = plan_of(6, mask=mask)
    _, processed = sample(logits.clone(), plan, sample_rows(plan))
    assert torch.equal(processed.isinf(), ~torch.from_numpy(allowed))
    assert torch.equal(processed[torch.from_numpy(allowed)], logits[torch.from_numpy(allowed)])
    rows[:] = 0
    rows[:, 1] = 1 << 5
    assert draw(logits, plan) == [37] * 6


def test_drafts_are_sampled_at_their_own_positions_with_their_own_counts() -> None:
    plan = plan_of(
        1,
        drafts=[2],
        tokens=[3, 7, 7],
        temperature=np.zeros(1, np.float32),
        penalties=SparseRows(np.array([0, 1], np.int32), np.array([3], np.int32), np.array([1], np.float32)),
        presence=np.zeros(1, np.float32),
        frequency=np.ones(1, np.float32),
        repetition=np.ones(1, np.float32),
    )
    rows = sample_rows(plan)
    assert rows.positions.tolist() == [11, 12, 13]
    _, processed = sample(torch.zeros(3, VOCAB), plan, rows)
    assert processed[:, 7].tolist() == [0, -1, -2]
    assert processed[:, 3].tolist() == [-1, -1, -1]


def test_logprobs_are_of_the_processed_logits() -> None:
    logits = random_logits(3)
    ids = torch.tensor([1, 2, 3])
    first, second, third = logprobs_of(logits, ids, [2, -1, 0])
    table = torch.log_softmax(logits, -1)
    assert second is None and first is not None and third is not None
    assert first.chosen == pytest.approx(float(table[0, 1]), abs=1e-5)
    assert [token for token, _ in first.top] == table[0].topk(2).indices.tolist()
    assert third.chosen == pytest.approx(float(table[2, 3]), abs=1e-5)
    assert third.top == ()

"""Bytes and operations of a step: by hand, and what must hold whatever the step is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.core.errors import UsageError
from inferloop.core.shape import ModelShape
from inferloop.core.step_cost import StepCost, StepLoad, WeightBytes, step_cost

SMOLLM2 = ModelShape("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_embeddings=True)
LLAMA_8B = ModelShape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, tied_embeddings=False)
STORED = WeightBytes.in_format(SMOLLM2, "q4_1", "q8_0")
OF_EACH_TOKEN = ("embedding", "attention", "activations")


def test_one_decoded_token_reads_every_weight_once() -> None:
    cost = step_cost(SMOLLM2, StepLoad.decode(1, 0), STORED)
    assert cost["qkv"].read_bytes == 30 * 576 * (576 + 2 * 192) * 20 / 32 == 10_368_000
    assert cost["out"].read_bytes == 30 * 576 * 576 * 20 / 32 == 6_220_800
    assert cost["gate_up"].read_bytes == 30 * 576 * 3072 * 20 / 32 == 33_177_600
    assert cost["down"].read_bytes == 30 * 1536 * 576 * 20 / 32 == 16_588_800
    assert cost["head"].read_bytes == 49152 * 576 * 34 / 32 == 30_081_024
    assert sum(cost[name].num_bytes for name in ("qkv", "out", "gate_up", "down", "head")) == 96_436_224
    assert cost["embedding"].read_bytes == 576 * 34 / 32 == 612
    assert cost["norms"].read_bytes == 61 * 576 * 4 == 140_544
    assert (cost["attention"].read_bytes, cost["attention"].written_bytes) == (0, 23_040)
    assert cost.memory_bytes == 96_436_224 + 612 + 140_544 + 23_040


def test_operations_of_one_decoded_token() -> None:
    cost = step_cost(SMOLLM2, StepLoad.decode(1, 319), STORED)
    assert cost["gate_up"].ops == 2 * 30 * 576 * 3072
    assert cost["head"].ops == 2 * 49152 * 576
    assert cost["attention"].ops == 4 * 30 * 9 * 64 * 320  # 319 keys of the past and its own
    assert cost.ops == 2 * 134_479_872 + 22_118_400 == 291_078_144


def test_many_streams_read_weights_once_and_each_its_own_past() -> None:
    cost = step_cost(SMOLLM2, StepLoad.decode(32, 320), STORED)
    assert cost["gate_up"].read_bytes == 33_177_600
    assert cost["attention"].read_bytes == 32 * 320 * 23_040 == 235_929_600
    assert cost["attention"].written_bytes == 32 * 23_040
    assert cost["embedding"].read_bytes == 32 * 612


def test_a_prompt_sees_half_of_its_square_and_samples_one_row() -> None:
    cost = step_cost(SMOLLM2, StepLoad.prefill(512), STORED)
    assert cost["attention"].ops == 4 * 30 * 9 * 64 * (512 * 513 // 2)
    assert cost["attention"].read_bytes == 0  # what it reads it has just written
    assert cost["qkv"].ops == 2 * 30 * 576 * 960 * 512
    assert cost["head"].ops == 2 * 49152 * 576
    per_layer_and_token = (576 + 576 + 576 + 1536) + (960 + 576 + 3072 + 576)  # taken, then given
    assert cost["activations"].num_bytes == 512 * 30 * 4 * per_layer_and_token
    assert cost["activations"].reused_after_bytes == 512 * 4 * per_layer_and_token


def test_a_step_that_samples_nobody_leaves_the_head_alone() -> None:
    cost = step_cost(SMOLLM2, StepLoad((256,), (0,), 0), STORED)
    assert (cost["head"].num_bytes, cost["head"].ops) == (0, 0)


def test_an_empty_step_costs_nothing() -> None:
    cost = step_cost(SMOLLM2, StepLoad((), (), 0), STORED)
    assert all((part.num_bytes, part.ops) == (0, 0) for part in cost)


def test_kv_bytes_are_the_callers() -> None:
    half = step_cost(SMOLLM2, StepLoad.decode(8, 320), STORED, SMOLLM2.kv_bytes_per_token("int8"))
    assert half["attention"].read_bytes == 8 * 320 * 11_520


def test_a_window_bounds_keys_and_bytes() -> None:
    cost = step_cost(SMOLLM2, StepLoad((3,), (10,), 1), STORED, windows=(12,))
    assert cost["attention"].read_bytes == 10 * 23_040
    assert cost["attention"].ops == 4 * 30 * 9 * 64 * (11 + 12 + 12)
    far = step_cost(SMOLLM2, StepLoad((2,), (100,), 1), STORED, windows=(12,))
    assert far["attention"].read_bytes == 11 * 23_040
    assert far["attention"].ops == 4 * 30 * 9 * 64 * (12 + 12)


def test_layers_with_and_without_a_window_share_the_cost() -> None:
    cost = step_cost(SMOLLM2, StepLoad.decode(1, 101), STORED, windows=(12, 12, None))
    assert cost["attention"].read_bytes == pytest.approx((20 * 11 + 10 * 101) * 23_040 / 30)
    assert cost["attention"].ops == pytest.approx(4 * 9 * 64 * (20 * 12 + 10 * 102))


def test_layers_without_kv_have_neither_attention_nor_its_products() -> None:
    some = replace(SMOLLM2, kv_heads_per_layer=(3,) * 20 + (0,) * 10)
    cost = step_cost(some, StepLoad.decode(1, 99), WeightBytes.in_format(some, "bf16"))
    assert cost["attention"].ops == 4 * 20 * 9 * 64 * 100
    assert cost["out"].read_bytes == 20 * 576 * 576 * 2
    assert cost["down"].read_bytes == 30 * 1536 * 576 * 2


def test_a_large_untied_model_by_hand() -> None:
    cost = step_cost(LLAMA_8B, StepLoad.decode(1, 4096), WeightBytes.in_format(LLAMA_8B, "bf16"))
    assert cost["qkv"].read_bytes == 2 * 32 * 4096 * (4096 + 2 * 1024)
    assert cost["head"].read_bytes == 2 * 128256 * 4096
    assert cost["attention"].read_bytes == 4096 * 131_072


@pytest.mark.parametrize(
    "wrong", [((1,), (), 0), ((-1,), (0,), 0), ((1,), (-1,), 0), ((1,), (0,), 2), ((1,), (0,), -1)]
)
def test_counts_that_cannot_be_are_refused(wrong: tuple[tuple[int, ...], tuple[int, ...], int]) -> None:
    with pytest.raises(UsageError):
        StepLoad(*wrong)


sequences = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), max_size=6)
windows = st.one_of(st.none(), st.integers(1, 60))


def load_of(pairs: list[tuple[int, int]]) -> StepLoad:
    return StepLoad(tuple(new for new, _ in pairs), tuple(past for _, past in pairs), len(pairs))


def cost_of(pairs: list[tuple[int, int]], window: int | None = None) -> StepCost:
    return step_cost(SMOLLM2, load_of(pairs), STORED, windows=(window,))


@given(sequences, windows)
def test_scores_are_those_of_counting_every_pair(pairs: list[tuple[int, int]], window: int | None) -> None:
    seen = [[p for p in range(past + new) if p <= q and (window is None or p > q - window)]
            for new, past in pairs for q in range(past, past + new)]  # fmt: skip
    assert load_of(pairs).num_scores(window) == sum(map(len, seen))
    from_past = sum(
        len({p for q in range(past, past + new) for p in range(past) if window is None or p > q - window})
        for new, past in pairs
    )
    assert load_of(pairs).num_past_seen(window) == from_past


@given(sequences, sequences, windows)
def test_sequences_add_up_and_weights_are_shared(
    some: list[tuple[int, int]], others: list[tuple[int, int]], window: int | None
) -> None:
    a, b, both = (cost_of(pairs, window) for pairs in (some, others, some + others))
    for one, other, sum_ in zip(a, b, both, strict=True):
        assert sum_.ops == one.ops + other.ops
        assert sum_.written_bytes == one.written_bytes + other.written_bytes
        if sum_.name in OF_EACH_TOKEN:
            assert sum_.read_bytes == one.read_bytes + other.read_bytes
        else:
            assert sum_.read_bytes == max(one.read_bytes, other.read_bytes)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 90))
def test_a_prompt_cut_in_two_computes_the_same(head: int, tail: int, past: int) -> None:
    whole = cost_of([(head + tail, past)])
    first, second = cost_of([(head, past)]), cost_of([(tail, past + head)])
    assert whole["attention"].ops == first["attention"].ops + second["attention"].ops
    assert whole["gate_up"].ops == first["gate_up"].ops + second["gate_up"].ops
    assert whole.memory_bytes <= first.memory_bytes + second.memory_bytes


@given(sequences.filter(bool), st.integers(1, 9), st.integers(0, 9))
def test_more_of_anything_never_costs_less(pairs: list[tuple[int, int]], new: int, past: int) -> None:
    (n, p), *rest = pairs
    less, more = cost_of(pairs), cost_of([(n + new, p + past), *rest])
    for before, after in zip(less, more, strict=True):
        assert after.num_bytes >= before.num_bytes
        assert after.ops >= before.ops

"""Layers with experts in the native step: who goes where, every form that weights have, any number of rows.

That the numbers are transformers' is told by test_architectures.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferloop.engine.compute.groups import GROUP_TYPES
from inferloop.engine.schedule.step import SamplingColumns, StepPlan
from inferloop.models.resolve import ModelFiles, open_files

_native = pytest.importorskip("inferloop.engine.compute.native._native")
from inferloop.engine.compute.native.config import NativeConfig  # noqa: E402
from inferloop.engine.compute.native.memory import expert_bytes, partial_bytes  # noqa: E402
from inferloop.engine.compute.native.pack import pack_model  # noqa: E402
from inferloop.engine.compute.native.program import program_of  # noqa: E402
from inferloop.engine.compute.native.runner import NativeRunner  # noqa: E402

RandomModel = Callable[..., Any]
Floats = NDArray[np.float32]
ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
LEVELS: tuple[Any, ...] = ISAS[: ISAS.index(_native.best_isa()) + 1]
HIDDEN, FFN, VOCAB, NUM = 256, 256, 70, 4
EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}


def load(files: ModelFiles, **options: Any) -> NativeRunner:
    defaults: dict[str, Any] = {"weights": "stored", "num_blocks": 160, "num_threads": 2}
    config = NativeConfig(**(defaults | options))
    return NativeRunner(files.header, pack_model(files.header, config.weights), config)


def plan_of(*prompts: NDArray[np.int32], position: int = 0) -> StepPlan:
    """A step of these tokens of as many sequences, of which each has blocks of its own and a past of `position`."""
    n = len(prompts)
    width = max(position + len(prompt) for prompt in prompts) // 16 + 1
    zeros = np.zeros(n, np.float32)
    return StepPlan(
        step_id=0,
        slots=np.arange(n, dtype=np.int32),
        offsets=np.cumsum([0, *map(len, prompts)]).astype(np.int32),
        token_ids=np.concatenate(prompts).astype(np.int32),
        first_positions=np.full(n, position, np.int32),
        block_tables=(np.arange(n * width, dtype=np.int32).reshape(n, width),),
        sample_rows=np.full(n, -1, np.int32),
        num_drafts=np.zeros(n, np.int32),
        sampling=SamplingColumns(
            temperature=zeros,
            top_p=zeros + 1,
            top_k=np.zeros(n, np.int32),
            min_p=zeros,
            seed=np.zeros(n, np.uint64),
            num_logprobs=np.full(n, -1, np.int32),
        ),
    )


@settings(max_examples=80, deadline=None)
@given(
    m=st.integers(1, 9),
    n=st.sampled_from([1, 2, 5, 8, 60, 128, 600]),
    data=st.data(),
    renormalized=st.booleans(),
    most=st.integers(1, 4),
)
def test_rows_go_where_torch_sends_them(m: int, n: int, data: Any, renormalized: bool, most: int) -> None:
    """Those too that are equal, of which there are many here: few values, and rows of one alone."""
    per_token = data.draw(st.integers(1, min(n, 10)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    probabilities = (rng.integers(1, data.draw(st.sampled_from([2, 4, 1000])), (m, n)) / 1024).astype(np.float32)
    values, chosen = torch.from_numpy(probabilities).topk(per_token)
    counts = values / values.sum(-1, keepdim=True) if renormalized else values
    found: dict[int, dict[int, float]] = {}
    last = (-1, -1)
    for expert, rows, parts in _native.experts.parts(probabilities, per_token, renormalized, most):
        assert 1 <= len(rows) <= most
        assert (expert, rows[0]) > last and rows == sorted(rows)
        last = (expert, rows[-1])
        for row, count in zip(rows, parts, strict=True):
            found.setdefault(row, {})[expert] = count
    for row in range(m):
        expected = dict(zip(chosen[row].tolist(), counts[row].tolist(), strict=True))
        assert found[row] == pytest.approx(expected, rel=1e-6)


def test_numbers_that_are_none_choose_as_many_experts_as_others_do() -> None:
    probabilities = np.full((3, 8), np.nan, np.float32)
    probabilities[1, 3:] = 0.25
    probabilities[2] = np.inf
    parts = _native.experts.parts(probabilities, 2, True, 4)
    assert sorted(row for _, rows, _ in parts for row in rows) == [0, 0, 1, 1, 2, 2]


def write(path: Path, dtype: str, expert: int | None) -> ModelFiles:
    """A llama of two layers that send even tokens to expert 1 and odd ones to expert 2 of 4, each alone; or one that
    has the feed-forward of this expert in all its layers. Half of a hidden state's first number is left by nobody."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("block_count", 2), ("context_length", 64), ("embedding_length", HIDDEN)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    if expert is None:
        writer.add_expert_count(NUM)
        writer.add_expert_used_count(1)

    def add(name: str, *shape: int, still: bool = False) -> None:
        """Random, and the same whatever the model; `still`: output 0 is nearly nothing."""
        codes, kind = stored(rng, dtype, shape)
        if still:
            codes[..., 0, :] = 0
        if len(shape) == 3 and expert is not None:
            codes = codes[expert]
        writer.add_tensor(name if expert is None else name.replace("_exps", ""), codes, raw_dtype=kind)

    embedding = rng.standard_normal((VOCAB, HIDDEN), np.float32)
    embedding[:, 0] = np.where(np.arange(VOCAB) % 2, -8, 8)
    writer.add_tensor("token_embd.weight", embedding)
    for name in ("output_norm", *(f"blk.{i}.{part}_norm" for i in range(2) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for i in range(2):
        for part in "qkv":
            add(f"blk.{i}.attn_{part}.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN, still=True)
        add(f"blk.{i}.ffn_gate_exps.weight", NUM, FFN, HIDDEN)
        add(f"blk.{i}.ffn_up_exps.weight", NUM, FFN, HIDDEN)
        add(f"blk.{i}.ffn_down_exps.weight", NUM, HIDDEN, FFN, still=True)
        if expert is None:
            router = np.zeros((NUM, HIDDEN), np.float32)
            router[1, 0], router[2, 0] = 4, -4
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_files("tiny", path)


def stored(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> tuple[NDArray[Any], Any]:
    kind = gguf.GGMLQuantizationType[dtype.upper().replace("FP", "F")]
    if dtype not in GROUP_TYPES:
        return 0.05 * rng.standard_normal(shape, np.float32), gguf.GGMLQuantizationType.F32
    block, size = GROUP_TYPES[dtype].block, gguf.GGML_QUANT_SIZES[kind][0]
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // size * block.itemsize), dtype=np.uint8)
    fields = codes.view(block)
    for field in set(block.names or ()) & {"d", "m", "dmin"}:
        fields[field] = 0.002 * rng.standard_normal(fields.shape)
    return codes, kind


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        *((dtype, "stored") for dtype in ("fp32", "q4_0", "q4_1", "q8_0", "q3_k", "q4_k", "q6_k", "iq4_xs")),
        *(("fp32", weights) for weights in ("fp32", "bf16", "int8")),
    ],
)
def test_each_row_gets_its_expert_to_the_bit_in_every_form(dtype: str, weights: Any, tmp_path: Path) -> None:
    """What a model makes of it whose feed-forward is that expert alone: dequantized, multiplied and rounded alike."""
    both = write(tmp_path / "moe.gguf", dtype, None)
    alone = [write(tmp_path / f"{e}.gguf", dtype, e) for e in (1, 2)]
    tokens = np.random.default_rng(3).integers(0, VOCAB, 23).astype(np.int32)
    prompts = [tokens[i : i + 1] for i in range(len(tokens))]  # one token each, so that nobody sees another
    for isa in LEVELS:
        got = load(both, weights=weights, isa=isa).logits(plan_of(*prompts))
        expected = [load(one, weights=weights, isa=isa).logits(plan_of(*prompts)) for one in alone]
        assert not np.array_equal(expected[0], expected[1])
        np.testing.assert_array_equal(got, np.where(tokens[:, None] % 2, expected[1], expected[0]))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, random_model: RandomModel) -> ModelFiles:
    path = tmp_path_factory.mktemp("tiny")
    random_model(path, "qwen3_moe", **EXPERTS, max_position_embeddings=2048, tie_word_embeddings=False)
    return open_files("tiny", path)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_threads_neighbours_and_cuts_change_no_bit(files: ModelFiles, weights: Any) -> None:
    """More rows, too, than go through the experts at a time."""
    rng = np.random.default_rng(0)
    long, short = (rng.integers(0, 131, num).astype(np.int32) for num in (1500, 40))
    whole = load(files, weights=weights).logits(plan_of(long))
    for threads in (1, 3):
        runner = load(files, weights=weights, num_threads=threads)
        cut = [runner.logits(plan_of(long[:1100])), runner.logits(plan_of(long[1100:1499], position=1100))]
        cut.append(runner.logits(plan_of(long[1499:], position=1499)))
        np.testing.assert_array_equal(np.concatenate(cut), whole)
        beside = load(files, weights=weights, num_threads=threads, num_blocks=200).logits(plan_of(long, short))
        np.testing.assert_array_equal(beside[: len(long)], whole)
        np.testing.assert_array_equal(beside[len(long) :], runner.logits(plan_of(short)))


def test_what_lies_between_the_products_is_bounded_and_counted(files: ModelFiles, monkeypatch: Any) -> None:
    """By the model and the threads alone: 1024 rows of scores, of inputs and of three experts' units, in fp32 at most,
    and 128 gathered rows for each thread."""
    shape = files.header.shape
    rows = 1024 * 4 * (16 + shape.hidden_size + 3 * 32)
    of_thread = 128 * 4 * shape.hidden_size
    for threads in (1, 4):
        taken = expert_bytes(shape, threads)
        assert rows + threads * of_thread < taken < 1.2 * (rows + threads * of_thread)
    assert expert_bytes(replace(shape, experts=None), 2) == 0
    asked: list[int] = []
    monkeypatch.setattr("inferloop.engine.compute.native.runner.check_room", lambda _, of_step: asked.append(of_step))
    load(files, num_threads=4)
    assert asked == [taken + partial_bytes(shape, 2048, 4)]


@pytest.mark.parametrize(
    "changes",
    [
        {"experts_per_token": 0},
        {"experts_per_token": 17},
        {"num_experts": 0, "experts_per_token": 0},
        {"num_experts": 15},
        {"num_experts": 1 << 30},
        {"expert_ffn_size": 48},
        {"expert_ffn_size": 64},
        {"routed": (True,)},
        {"routed": (True, False)},
    ],
)
def test_counts_that_do_not_fit_are_refused_before_anything_is_computed(
    files: ModelFiles, changes: dict[str, Any]
) -> None:
    packed, program = pack_model(files.header, "stored"), program_of(files.header, 64, None)
    _native.Engine(packed, program, "scalar", "bf16", 4, 1)
    with pytest.raises(ValueError):
        _native.Engine(packed, replace(program, **changes), "scalar", "bf16", 4, 1)

"""Adapters beside the weights against weights that they were added to, in transformers; and who shares a step with
whom."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.adapters import prepared, run_through, updates_of, write_adapter

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.adapter import load_adapter
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.step import NO_ADAPTER, Float32
from inferloop.models.adapters.read import read_adapter
from inferloop.models.headers import read_header
from inferloop.models.resolve import open_files

RandomModel = Callable[..., Any]
PROMPT = tuple(np.random.default_rng(1).integers(3, 131, 70).tolist())
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GEMMA3 = {
    "head_dim": 32,
    "query_pre_attn_scalar": 40,
    "sliding_window": 24,
    "pad_token_id": 0,
    "num_hidden_layers": 7,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
    },
}
UNTIED = {"tie_word_embeddings": False}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", UNTIED, {}),
    "llama, rank-stabilized": ("llama", UNTIED, {"use_rslora": True, "rank": 7}),
    "llama, some modules": ("llama", UNTIED, {"modules": ("v_proj", "up_proj")}),
    "llama, ranks and strengths of their own": (
        "llama",
        UNTIED,
        {"ranks": {"0.self_attn.q_proj": 2, "up_proj": 6}, "alpha_pattern": {"k_proj": 3.0, "mlp.up_proj": 20}},
    ),
    "mistral": ("mistral", {**UNTIED, "sliding_window": 24}, {}),
    "qwen2": ("qwen2", UNTIED, {}),
    "qwen3": ("qwen3", {**UNTIED, "head_dim": 32}, {}),
    "gemma3": ("gemma3_text", GEMMA3, {}),
    "mixtral, attention": (
        "mixtral",
        {**UNTIED, "num_local_experts": 3, "num_experts_per_tok": 2},
        {"modules": ATTENTION},
    ),
}


def add_to(model: Any, path: Path) -> Any:
    """A copy of the transformers model with the adapter added to its weights."""
    merged = copy.deepcopy(model)
    state = merged.state_dict()
    for name, update in updates_of(path).items():
        state[name] += torch.from_numpy(update).float()
    merged.load_state_dict(state)
    return merged


def logits_of(model: Any) -> Float32:
    with torch.no_grad():
        logits: Float32 = model(torch.tensor([PROMPT])).logits[0].numpy()
    return logits


def load(path: Path, adapters: Sequence[Path] = (), **options: Any) -> TorchRunner:
    """With the adapters in slots 0 onward."""
    defaults: dict[str, Any] = {"dtype": "fp32", "num_blocks": 64, "block_size": 8}
    runner = TorchRunner.load(open_files("tiny", path), TorchConfig(**(defaults | options)))
    for slot, adapter in enumerate(adapters):
        runner.set_adapter(slot, prepared(runner, read_header(path), adapter))
    return runner


def run(
    runner: TorchRunner, slots: Sequence[int], budget: int = 64, max_tokens: int = 1, shorter: int = 0
) -> tuple[list[Float32], list[list[int]]]:
    return run_through(runner, PROMPT, slots, budget, max_tokens, shorter)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_merged_weights(family: str, random_model: RandomModel, tmp_path: Path) -> None:
    architecture, config, adapted = FAMILIES[family]
    model = random_model(tmp_path / "model", architecture, **config)
    path = write_adapter(tmp_path / "a", read_header(tmp_path / "model"), **adapted)
    expected, plain = logits_of(add_to(model, path)), logits_of(model)
    assert np.abs(expected - plain).max() > 0.3 * plain.std()
    for deterministic in (False, True):
        runner = load(tmp_path / "model", [path], deterministic=deterministic)
        for budget in (64, 7, 1):
            [got], _ = run(runner, [0], budget)
            assert np.abs(got - expected).max() < 1e-4 * expected.std()
        [got], _ = run(runner, [NO_ADAPTER])
        assert np.abs(got - plain).max() < 1e-4 * plain.std()


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_of_a_mixed_batch_is_answered_as_it_is_alone(
    deterministic: bool, random_model: RandomModel, tmp_path: Path
) -> None:
    random_model(tmp_path / "model", "llama", **UNTIED)
    header = read_header(tmp_path / "model")
    adapters = [
        write_adapter(tmp_path / "a", header, seed=1, rank=4),
        write_adapter(tmp_path / "b", header, seed=2, rank=16, modules=("q_proj", "v_proj", "down_proj")),
        write_adapter(tmp_path / "c", header, seed=3, rank=1, use_rslora=True),
    ]
    runner = load(tmp_path / "model", adapters, deterministic=deterministic, num_blocks=128)
    slots = [0, NO_ADAPTER, 2, 1, 0, NO_ADAPTER, 1]
    for budget in (64, 7):
        logits, together = run(runner, slots, budget, max_tokens=24)
        for i, slot in enumerate(slots):
            [same], [alone] = run(runner, [slot], budget, max_tokens=24, shorter=i)
            assert alone == together[i]
            if deterministic:
                assert np.array_equal(same, logits[i])
    assert len({tuple(tokens) for tokens in together}) == len(slots)
    # with memory for half of them: who is preempted comes back through the same adapter
    assert run(load(tmp_path / "model", adapters, deterministic=deterministic), slots, 64, 24)[1] == together


def test_rows_of_the_model_alone_keep_every_bit(random_model: RandomModel, tmp_path: Path) -> None:
    random_model(tmp_path / "model", "qwen2", **UNTIED)
    path = write_adapter(tmp_path / "a", read_header(tmp_path / "model"), spread=30.0)
    for dtype in ("fp32", "bf16"):
        runner = load(tmp_path / "model", [path], dtype=dtype)
        beside_adapted, _ = run(runner, [0, NO_ADAPTER, 0, NO_ADAPTER], 24)
        untouched, _ = run(load(tmp_path / "model", dtype=dtype), [NO_ADAPTER] * 4, 24)
        for i in (1, 3):
            assert np.array_equal(beside_adapted[i], untouched[i])
        assert not np.array_equal(beside_adapted[0], untouched[0])


def test_an_emptied_slot_computes_the_model_alone_and_a_new_one_what_came_last(
    random_model: RandomModel, tmp_path: Path
) -> None:
    random_model(tmp_path / "model", "llama", **UNTIED)
    header = read_header(tmp_path / "model")
    paths = [
        write_adapter(tmp_path / "a", header, seed=1),
        write_adapter(tmp_path / "b", header, seed=2, modules=("q_proj",)),
    ]
    runner = load(tmp_path / "model", paths)
    [second], _ = run(runner, [1])
    [plain], _ = run(runner, [NO_ADAPTER])
    runner.set_adapter(0, prepared(runner, header, paths[1]))
    assert np.array_equal(run(runner, [0])[0][0], second)
    runner.set_adapter(0, None)
    assert np.array_equal(run(runner, [0])[0][0], plain)


def test_numbers_that_overflow_are_refused_before_they_meet_anybody(random_model: RandomModel, tmp_path: Path) -> None:
    random_model(tmp_path / "model", "llama")
    header = read_header(tmp_path / "model")
    path = write_adapter(tmp_path / "a", header, spread=3e37, alpha=1000.0)
    with pytest.raises(ModelFileError, match="not finite"):
        load_adapter(read_adapter(path, header, max_rank=8))


def test_the_digest_is_that_of_the_content_alone(random_model: RandomModel, tmp_path: Path) -> None:
    random_model(tmp_path / "model", "llama")
    header = read_header(tmp_path / "model")

    def digest(name: str, **kind: Any) -> str:
        return load_adapter(read_adapter(write_adapter(tmp_path / name, header, **kind), header, max_rank=8)).digest

    first = digest("a", seed=1)
    assert first == digest("elsewhere", seed=1, base_model_name_or_path="what it was trained on")
    others = [digest("a", seed=2), digest("a", seed=1, alpha=9.0), digest("a", seed=1, modules=("q_proj",))]
    assert len({first, *others}) == 4

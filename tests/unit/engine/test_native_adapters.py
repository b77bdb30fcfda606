"""Adapters in the native step: against weights that they were added to, and who shares a step with whom, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.adapters import prepared, run_through, updates_of, write_adapter

from inferloop.core.errors import ModelFileError
from inferloop.engine.schedule.step import NO_ADAPTER, Float32
from inferloop.models.headers import read_header
from inferloop.models.resolve import open_files

_native = pytest.importorskip("inferloop.engine.compute.native._native")

RandomModel = Callable[..., Any]
PROMPT = tuple(np.random.default_rng(2).integers(3, 131, 150).tolist())
UNTIED = {"tie_word_embeddings": False}
GEMMA3 = {
    "head_dim": 32,
    "query_pre_attn_scalar": 40,
    "sliding_window": 24,
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", UNTIED, {}),
    "llama, some modules": ("llama", UNTIED, {"modules": ("k_proj", "gate_proj"), "rank": 33}),
    "llama, ranks of their own": ("llama", UNTIED, {"ranks": {"0.self_attn.q_proj": 2, "up_proj": 7}, "rank": 3}),
    "qwen2": ("qwen2", UNTIED, {"modules": ("q_proj", "v_proj", "o_proj", "down_proj")}),
    "qwen3": ("qwen3", {**UNTIED, "head_dim": 32}, {"use_rslora": True}),
    "gemma3": ("gemma3_text", GEMMA3, {}),
}
ISAS: tuple[Any, ...] = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")


def load(path: Path, adapters: Sequence[Path] = (), **options: Any) -> Any:
    """The native runner with the adapters in slots 0 onward, packed beside the model."""
    from inferloop.engine.compute.native.config import NativeConfig
    from inferloop.engine.compute.native.runner import NativeRunner

    defaults: dict[str, Any] = {"weights": "fp32", "num_blocks": 128, "num_threads": 2}
    config = NativeConfig(**(defaults | options))
    runner = NativeRunner.load(open_files("tiny", path), config, cache_dir=path / "cache")
    for slot, adapter in enumerate(adapters):
        runner.set_adapter(slot, prepared(runner, read_header(path), adapter))
    return runner


def merge_into(to: Path, model: Path, adapter: Path) -> Path:
    """The model's directory with the adapter added to its weights."""
    to.mkdir()
    for file in model.glob("*.json"):
        (to / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    for name, update in updates_of(adapter).items():
        weights[name] = (weights[name] + update).astype(np.float32)
    save_file(weights, to / "model.safetensors")
    return to


def run(
    runner: Any, slots: Sequence[int], budget: int = 256, max_tokens: int = 1, shorter: int = 0
) -> tuple[list[Float32], list[list[int]]]:
    return run_through(runner, PROMPT, slots, budget, max_tokens, shorter)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_merged_weights(family: str, random_model: RandomModel, tmp_path: Path) -> None:
    """But for keys and values in bf16, whose last bit a difference in the last bit of fp32 can change."""
    architecture, config, adapted = FAMILIES[family]
    random_model(tmp_path / "model", architecture, **config)
    adapter = write_adapter(tmp_path / "a", read_header(tmp_path / "model"), **adapted)
    whole = merge_into(tmp_path / "merged", tmp_path / "model", adapter)
    for isa in ISAS[: ISAS.index(_native.best_isa()) + 1]:
        [expected], _ = run(load(whole, isa=isa), [NO_ADAPTER])
        runner = load(tmp_path / "model", [adapter], isa=isa)
        [got], _ = run(runner, [0])
        [plain], _ = run(runner, [NO_ADAPTER])
        effect = np.abs(expected - plain)
        assert effect.max() > 0.3 * plain.std()
        assert np.abs(got - expected).max() < 0.03 * expected.std(), isa
        assert np.abs(got - expected).mean() < 0.01 * effect.mean(), isa
    for budget in (64, 7, 1):  # of the best level
        assert np.array_equal(run(runner, [0], budget)[0][0], got)


@pytest.mark.parametrize(("weights", "share"), [("bf16", 0.05), ("int8", 0.15)])
def test_other_formats_of_weights_come_close(
    weights: str, share: float, random_model: RandomModel, tmp_path: Path
) -> None:
    """`a` is held in a format that takes the same rows: what rounding adds is small against what the adapter does."""
    random_model(tmp_path / "model", "llama", **UNTIED)
    adapter = write_adapter(tmp_path / "a", read_header(tmp_path / "model"))
    [expected], _ = run(load(tmp_path / "model", [adapter]), [0])
    [exact], _ = run(load(tmp_path / "model"), [NO_ADAPTER])
    for isa in ISAS[: ISAS.index(_native.best_isa()) + 1]:
        runner = load(tmp_path / "model", [adapter], weights=weights, isa=isa)
        [got], [plain] = (run(runner, [slot])[0] for slot in (0, NO_ADAPTER))
        error, error_without = np.abs(got - expected).mean(), np.abs(plain - exact).mean()
        assert error < share * np.abs(expected - exact).mean() + 2 * error_without


def test_each_of_a_mixed_batch_has_the_bits_that_it_has_alone(random_model: RandomModel, tmp_path: Path) -> None:
    random_model(tmp_path / "model", "llama", **UNTIED)
    header = read_header(tmp_path / "model")
    adapters = [
        write_adapter(tmp_path / "a", header, seed=1, rank=4),
        write_adapter(tmp_path / "b", header, seed=2, rank=40, modules=("q_proj", "v_proj", "down_proj")),
        write_adapter(tmp_path / "c", header, seed=3, rank=1, use_rslora=True),
    ]
    slots = [0, NO_ADAPTER, 2, 1, 1, NO_ADAPTER, 0]
    for weights, num_threads, budget in (("fp32", 1, 9), ("fp32", 3, 256), ("int8", 3, 9)):
        untouched = load(tmp_path / "model", weights=weights)
        runner = load(tmp_path / "model", adapters, weights=weights, num_threads=num_threads)
        logits, together = run(runner, slots, budget, max_tokens=8)
        for i, slot in enumerate(slots):
            alone = run(untouched if slot == NO_ADAPTER else runner, [slot], 64, max_tokens=8, shorter=i)
            assert np.array_equal(alone[0][0], logits[i]) and alone[1][0] == together[i]
        assert len({tuple(tokens) for tokens in together}) > 4
    few = load(tmp_path / "model", adapters, num_blocks=40)
    assert run(few, slots, 64, 8)[1] == run(load(tmp_path / "model", adapters), slots, 64, 8)[1], "preempted"


def test_slots_are_filled_emptied_and_filled_again(random_model: RandomModel, tmp_path: Path) -> None:
    random_model(tmp_path / "model", "llama", **UNTIED)
    header = read_header(tmp_path / "model")
    paths = [write_adapter(tmp_path / name, header, seed=i, rank=2 + 40 * i) for i, name in enumerate("ab")]
    runner = load(tmp_path / "model", paths)
    [[first], [second], [plain]] = (run(runner, [slot])[0] for slot in (0, 1, NO_ADAPTER))
    runner.set_adapter(0, prepared(runner, header, paths[1]))
    assert np.array_equal(run(runner, [0])[0][0], second)
    runner.set_adapter(0, None)
    assert np.array_equal(run(runner, [0])[0][0], plain)
    runner.set_adapter(5, prepared(runner, header, paths[0]))
    assert np.array_equal(run(runner, [5])[0][0], first)
    with pytest.raises(ValueError, match="beyond the slots"):
        run(runner, [6])
    other = tmp_path / "other"
    random_model(other, "llama", **UNTIED, hidden_size=96, head_dim=16)
    with pytest.raises(ValueError, match="has another shape"):
        load(other).set_adapter(0, prepared(runner, header, paths[0]))


def test_numbers_of_any_size_are_held_by_codes(random_model: RandomModel, tmp_path: Path) -> None:
    """a of 1e-12 and b of 1e12 is what a and b of 1 are; what overflows is refused."""
    random_model(tmp_path / "model", "llama", **UNTIED)
    header = read_header(tmp_path / "model")
    path = write_adapter(tmp_path / "a", header)
    [expected], _ = run(load(tmp_path / "model", [path], weights="int8"), [0])
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: t * np.float32(2.0**-40 if "lora_A" in n else 2.0**40) for n, t in tensors.items()}, file)
    assert np.array_equal(run(load(tmp_path / "model", [path], weights="int8"), [0])[0][0], expected)
    save_file({n: t * np.float32(2.0**100 if "lora_A" in n else 2.0**60) for n, t in tensors.items()}, file)
    with pytest.raises(ModelFileError, match="cannot hold"):
        load(tmp_path / "model", [path], weights="int8")

"""Adapters beside the weights against weights that they were added to, in transformers; and who shares a step with
whom."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.adapters import write_adapter

from inferloop.core.errors import ModelFileError
from inferloop.core.request import Sampling
from inferloop.engine.compute.adapter import load_adapter
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import NO_ADAPTER
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
    """A copy of the transformers model with W + scaling * B @ A, by the words of the config."""
    config, tensors = (
        json.loads((path / "adapter_config.json").read_text()),
        load_file(path / "adapter_model.safetensors"),
    )
    merged = copy.deepcopy(model)
    state = merged.state_dict()
    for name, a in tensors.items():
        if "lora_A" not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = next(
            (v for k, v in config.get("alpha_pattern", {}).items() if module.endswith(k)), config["lora_alpha"]
        )
        scaling = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        update = scaling * tensors[name.replace("lora_A", "lora_B")].astype(np.float64) @ a.astype(np.float64)
        state[module + ".weight"] += torch.from_numpy(update).float()
    merged.load_state_dict(state)
    return merged


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def load(path: Path, adapters: Sequence[Path] = (), **options: Any) -> TorchRunner:
    """With the adapters in slots 0 onward."""
    defaults: dict[str, Any] = {"dtype": "fp32", "num_blocks": 64, "block_size": 8}
    runner = TorchRunner.load(open_files("tiny", path), TorchConfig(**(defaults | options)))
    for slot, adapter in enumerate(adapters):
        prepared = runner.prepare_adapter(load_adapter(read_adapter(adapter, read_header(path), max_rank=64)))
        runner.set_adapter(slot, prepared)
    return runner


def run(
    runner: TorchRunner, slots: Sequence[int], budget: int = 64, max_tokens: int = 1, shorter: int = 0
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """PROMPT through each of these slots together, without its last `shorter` tokens and each time one less: logits of
    all positions, and the greedy answers."""
    info = runner.info
    config = ScheduleConfig(
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_step_tokens=budget,
        share_prefixes=False,
    )
    scheduler = Scheduler(config)
    for i, slot in enumerate(slots):
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        prompt = PROMPT[: len(PROMPT) - shorter - i]
        scheduler.add(SequenceSpec(str(i), prompt, sampling, arrived_ms=i, adapter_slot=slot))
    logits: list[list[torch.Tensor]] = [[] for _ in slots]
    tokens: list[list[int]] = [[] for _ in slots]
    while scheduler.request_ids:
        plan = scheduler.schedule()
        assert plan is not None
        rows = runner.logits(plan)
        sequences = [int(s.spec.request_id) for s, _ in scheduler._chunks]
        for k, i in enumerate(sequences):
            logits[i].append(rows[plan.offsets[k] : plan.offsets[k + 1]])
        runner.submit(plan)
        for update in scheduler.commit(plan, runner.wait()):
            tokens[int(update.request_id)] += update.token_ids
    return [torch.cat(parts) for parts in logits], tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_merged_weights(family: str, random_model: RandomModel, tmp_path: Path) -> None:
    architecture, config, adapted = FAMILIES[family]
    model = random_model(tmp_path / "model", architecture, **config)
    path = write_adapter(tmp_path / "a", read_header(tmp_path / "model"), **adapted)
    expected, plain = logits_of(add_to(model, path)), logits_of(model)
    assert float((expected - plain).abs().max()) > 0.3 * float(plain.std())
    for deterministic in (False, True):
        runner = load(tmp_path / "model", [path], deterministic=deterministic)
        for budget in (64, 7, 1):
            [got], _ = run(runner, [0], budget)
            assert float((got - expected).abs().max()) < 1e-4 * float(expected.std())
        [got], _ = run(runner, [NO_ADAPTER])
        assert float((got - plain).abs().max()) < 1e-4 * float(plain.std())


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
                assert torch.equal(same, logits[i])
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
            assert torch.equal(beside_adapted[i], untouched[i])
        assert not torch.equal(beside_adapted[0], untouched[0])


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
    runner.set_adapter(0, runner.prepare_adapter(load_adapter(read_adapter(paths[1], header, max_rank=8))))
    assert torch.equal(run(runner, [0])[0][0], second)
    runner.set_adapter(0, None)
    assert torch.equal(run(runner, [0])[0][0], plain)


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

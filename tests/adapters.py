"""Adapters as PEFT writes them, made by tests: random, with PEFT's names of tensors and keys of the config. And what
tests do with them: add them to weights, put them into a runner, run a prompt through several at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inferloop.core.request import Sampling
from inferloop.engine.compute.adapter import load_adapter
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.models.adapters.read import MODULES, read_adapter
from inferloop.models.headers import ModelHeader
from inferloop.models.headers.tensors import expected_shapes


def write_adapter(
    path: Path,
    model: ModelHeader,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    modules: Iterable[str] = MODULES,
    spread: float = 0.15,
    ranks: dict[str, int] | None = None,
    drop: Iterable[str] = (),
    add: dict[str, np.ndarray[Any, Any]] | None = None,
    **config: Any,
) -> Path:
    """All layers of `modules`, numbers of standard deviation `spread`. `ranks`: of modules by the end of their name,
    beside PEFT's rank_pattern. `drop` and `add` change the tensors that are written, `config` the keys."""
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    names = list(modules)
    for name, (num_out, num_in) in shapes_of(model, names).items():
        r = next((r for end, r in (ranks or {}).items() if name.endswith(end)), rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = random.normal(0, spread, (r, num_in)).astype(np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = random.normal(0, spread, (num_out, r)).astype(np.float32)
    for name in drop:
        del tensors[name]
    tensors |= add or {}
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    if ranks:
        described["rank_pattern"] = ranks
    (path / "adapter_config.json").write_text(json.dumps({**described, "target_modules": names, **config}))
    return path


def shapes_of(model: ModelHeader, modules: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """(out, in) of the matrices of these names in all layers."""
    names = tuple(modules)
    return {
        weight.removesuffix(".weight"): shape
        for weight, shape in expected_shapes(model.shape, model.structure).items()
        if weight.startswith("model.layers.") and ".experts." not in weight and weight.split(".")[-2] in names
    }


def updates_of(adapter: Path) -> dict[str, np.ndarray[Any, Any]]:
    """By the name of the weight, what is added to it: scaling * B @ A in fp64, by the words of the config."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    updates = {}
    for name, a in tensors.items():
        if "lora_A" not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alphas = [value for end, value in config.get("alpha_pattern", {}).items() if module.endswith(end)]
        scaling = [*alphas, config["lora_alpha"]][0] / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        b = tensors[name.replace("lora_A", "lora_B")]
        updates[module + ".weight"] = scaling * b.astype(np.float64) @ a.astype(np.float64)
    return updates


def prepared(runner: Any, model: ModelHeader, adapter: Path) -> Any:
    """What the runner makes of it, for one of its slots."""
    return runner.prepare_adapter(load_adapter(read_adapter(adapter, model, max_rank=64)))


def run_through(
    runner: Any, prompt: Sequence[int], slots: Sequence[int], budget: int, max_tokens: int = 1, shorter: int = 0
) -> tuple[list[np.ndarray[Any, Any]], list[list[int]]]:
    """The prompt without its last `shorter` tokens through each of these slots together, each time one token less:
    logits of all positions, greedy answers. What was sampled from is what `logits` tells, though a step computes only
    the rows that are asked for."""
    sizes = {name: getattr(runner.info, name) for name in ("vocab_size", "context_length", "block_size", "num_blocks")}
    scheduler = Scheduler(ScheduleConfig(max_step_tokens=budget, share_prefixes=False, **sizes))
    for i, slot in enumerate(slots):
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, num_logprobs=0)
        text = tuple(prompt[: len(prompt) - shorter - i])
        scheduler.add(SequenceSpec(str(i), text, sampling, arrived_ms=i, adapter_slot=slot))
    logits: list[list[np.ndarray[Any, Any]]] = [[] for _ in slots]
    tokens: list[list[int]] = [[] for _ in slots]
    while scheduler.request_ids:
        plan = scheduler.schedule()
        assert plan is not None
        found = runner.logits(plan)
        rows = found if isinstance(found, np.ndarray) else found.float().numpy()
        for k, (sequence, _) in enumerate(scheduler._chunks):
            logits[int(sequence.spec.request_id)].append(rows[plan.offsets[k] : plan.offsets[k + 1]])
        runner.submit(plan)
        for update in scheduler.commit(plan, runner.wait()):
            i = int(update.request_id)
            tokens[i] += update.token_ids
            last = logits[i][-1][-1].astype(np.float64)
            chosen = last.max() - np.log(np.exp(last - last.max()).sum()) - last.max()
            assert update.logprobs is not None and update.logprobs[0].chosen == pytest.approx(chosen, abs=1e-4)
    return [np.concatenate(parts) for parts in logits], tokens

"""Adapters as PEFT writes them, made by tests: random, with PEFT's names of tensors and keys of the config."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from inferloop.models.adapters.read import MODULES
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

"""The real model with an adapter, against transformers with the adapter added to its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.adapters import prepared, updates_of, write_adapter

from inferloop.core.request import Sampling
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import NO_ADAPTER
from inferloop.models.resolve import ModelFiles

Prompts = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def adapter(embedded_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 8, of all modules: strong enough that nearly every answer becomes another."""
    folder = tmp_path_factory.mktemp("adapter")
    return write_adapter(folder, embedded_model.header, seed=8, rank=8, alpha=16.0, spread=0.05)


@pytest.fixture(scope="module")
def adapted_twin(twin: Any, adapter: Path) -> Iterator[Any]:
    """transformers' model with the adapter added to its weights."""
    model = copy.deepcopy(twin)
    state = model.state_dict()
    for name, update in updates_of(adapter).items():
        state[name] += torch.from_numpy(update).float()
    yield model


def log_probabilities(runner: Any, text: tuple[int, ...], slot: int) -> torch.Tensor:
    """Of every position, in fp64."""
    info = runner.info
    sizes = {name: getattr(info, name) for name in ("vocab_size", "context_length", "block_size", "num_blocks")}
    scheduler = Scheduler(ScheduleConfig(max_step_tokens=1024, share_prefixes=False, **sizes))
    scheduler.add(SequenceSpec("a", text, Sampling(temperature=0.0, max_tokens=1), adapter_slot=slot))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_tokens == len(text)
    return torch.log_softmax(torch.as_tensor(np.asarray(runner.logits(plan))).double(), -1)


def divergence(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of a position, nats."""
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


def of_twin(model: Any, text: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([text])).logits[0].double(), -1)


def test_torch_computes_what_merged_weights_do(
    embedded_model: ModelFiles, adapter: Path, twin: Any, adapted_twin: Any, prompts: Prompts
) -> None:
    runner = TorchRunner.load(embedded_model, TorchConfig(dtype="fp32", num_blocks=64))
    runner.set_adapter(0, prepared(runner, embedded_model.header, adapter))
    for text in prompts[::5]:
        expected, plain = of_twin(adapted_twin, text), of_twin(twin, text)
        assert divergence(plain, expected) > 0.05
        got = log_probabilities(runner, text, 0)
        assert float((got - expected).abs().max()) < 1e-3
        assert float((log_probabilities(runner, text, NO_ADAPTER) - plain).abs().max()) < 1e-3


@pytest.mark.parametrize(("weights", "most"), [("fp32", 0.0003), ("bf16", 0.002), ("stored", 0.02), ("int8", 0.02)])
def test_every_native_class_comes_as_close_as_it_does_without(
    weights: Any, most: float, embedded_model: ModelFiles, adapter: Path, adapted_twin: Any, prompts: Prompts
) -> None:
    pytest.importorskip("inferloop.engine.compute.native._native")
    from inferloop.engine.compute.native.config import NativeConfig
    from inferloop.engine.compute.native.runner import NativeRunner

    runner = NativeRunner.load(embedded_model, NativeConfig(weights=weights, num_blocks=64))
    runner.set_adapter(3, prepared(runner, embedded_model.header, adapter))
    found = [divergence(of_twin(adapted_twin, text), log_probabilities(runner, text, 3)) for text in prompts[::2]]
    assert sum(found) / len(found) < most

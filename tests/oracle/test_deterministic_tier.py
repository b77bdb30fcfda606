"""Deterministic mode with a second tier of the prefix cache: every answer is the one that is computed alone.

On a tiny random model, whose answers turn with the last bit of a logit, through the real runner and a real store.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from inferloop.core.clock import RealClock
from inferloop.core.request import Sampling
from inferloop.engine.blockstore.store import BlockStore, StoreConfig
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.models.resolve import ModelFiles, open_files

VOCAB = 512


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)
    model.save_pretrained(path)
    return open_files("tiny", path)


def specs_of(rng: random.Random, num: int) -> list[SequenceSpec]:
    """Prompts that begin alike for up to 49 tokens, greedy and sampled."""
    stem = [rng.randrange(VOCAB) for _ in range(50)]
    specs = []
    for i in range(num):
        prompt = (*stem[: rng.randrange(50)], *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))))
        sampling = Sampling(temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randrange(4, 40))
        specs.append(SequenceSpec(f"r{i}", prompt, sampling, seed=i))
    return specs


def answer(
    files: ModelFiles, specs: list[SequenceSpec], store: BlockStore | None, *, num_blocks: int, budget: int = 24
) -> tuple[dict[str, list[int]], Scheduler]:
    """All of them together through a fresh runner; one at a time and from nothing without a store."""
    runner = TorchRunner.load(files, TorchConfig(dtype="fp32", deterministic=True, block_size=8, num_blocks=num_blocks))
    config = ScheduleConfig(
        vocab_size=VOCAB,
        context_length=256,
        block_size=8,
        num_blocks=num_blocks,
        max_sequences=4 if store else 1,
        max_step_tokens=budget,
        share_prefixes=store is not None,
    )
    scheduler = Scheduler(config, store)
    answers: dict[str, list[int]] = {spec.request_id: [] for spec in specs}
    for spec in specs:
        scheduler.add(spec)
    while (plan := scheduler.schedule()) is not None:
        runner.submit(plan)
        for update in scheduler.commit(plan, runner.wait()):
            answers[update.request_id] += update.token_ids
    return answers, scheduler


@pytest.mark.parametrize("on_disk", [False, True])
def test_answers_from_loaded_blocks_are_those_computed_alone(tiny: ModelFiles, on_disk: bool, tmp_path: Path) -> None:
    rng = random.Random(3)
    specs = specs_of(rng, 16)
    truth, _ = answer(tiny, specs, None, num_blocks=32)
    assert len({tuple(tokens) for tokens in truth.values()}) > 12
    block_bytes = 2 * 2 * 2 * 8 * 8 * 4  # keys and values, layers, heads, head_dim, tokens, fp32
    config = StoreConfig(folder=tmp_path, patience_s=60.0) if on_disk else StoreConfig(memory_bytes=1 << 24)
    store = BlockStore(config, identity="tiny", block_bytes=block_bytes, clock=RealClock())
    try:
        for budget in (24, 9, 100):  # a new process each time, which cuts prompts in other places
            rng.shuffle(specs)
            found, scheduler = answer(tiny, specs, store, num_blocks=13, budget=budget)
            assert found == truth
            assert scheduler.num_preemptions > 0
        stats = scheduler.tier_stats
        assert stats is not None and stats.hits > 60
    finally:
        store.close()

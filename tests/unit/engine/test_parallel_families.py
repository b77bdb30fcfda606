"""Every dense family over two and three processes: the logits and the greedy text of one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from inferloop.core.errors import EngineError
from inferloop.core.request import Sampling
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.parallel.lead import LeadRunner
from inferloop.engine.compute.torch.parallel.process_group import ProcessGroup
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec, SequenceUpdate
from inferloop.engine.schedule.step import StepResult
from inferloop.fleet.act.ranks import RankProcesses
from inferloop.models.resolve import open_files

RandomModel = Callable[..., Any]
LoadSplit = Callable[..., contextlib.AbstractContextManager[Any]]

CONFIG = TorchConfig(dtype="fp32", num_blocks=64, block_size=8)
PROMPT = tuple(np.random.default_rng(1).integers(3, 131, 40).tolist())
UNTIED = {"tie_word_embeddings": False}
WINDOW = {"sliding_window": 24}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 40, "pad_token_id": 0, **WINDOW}
UNEVEN = "llama, nine heads over three"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    UNEVEN: ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama, one KV head, biases everywhere": (
        "llama",
        {**UNTIED, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("mistral", {**UNTIED, **WINDOW}),
    "qwen2": ("qwen2", {**UNTIED, "intermediate_size": 97}),
    "qwen3": ("qwen3", {**UNTIED, "head_dim": 32}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}


def run(
    runner: Any, budget: int, prompt: tuple[int, ...] = PROMPT, *, pool: bool = False, **sampling: Any
) -> list[SequenceUpdate]:
    """What comes of a prompt in steps of at most `budget` tokens; greedy unless `sampling` has it otherwise."""
    scheduler = schedule(runner, budget, prompt, pool=pool, **sampling)
    updates = list[SequenceUpdate]()
    while scheduler.request_ids:
        plan = scheduler.schedule()
        assert plan is not None
        runner.submit(plan)
        updates += scheduler.commit(plan, runner.wait())
    return updates


def logits_of(runner: Any, budget: int, prompt: tuple[int, ...] = PROMPT) -> torch.Tensor:
    """Of every position, computed in steps of at most `budget` tokens."""
    scheduler = schedule(runner, budget, prompt, pool=False)
    found = list[torch.Tensor]()
    while scheduler.request_ids:
        plan = scheduler.schedule()
        assert plan is not None
        found.append(torch.as_tensor(runner.logits(plan)))
        num_tokens = int(plan.sample_rows[0] >= 0)
        tokens = found[-1][-1:].argmax(-1)[:num_tokens].numpy().astype(np.int32)
        scheduler.commit(plan, StepResult(plan.step_id, np.array([0, num_tokens], np.int32), tokens))
    return torch.cat(found)


def schedule(runner: Any, budget: int, prompt: tuple[int, ...], *, pool: bool, **sampling: Any) -> Scheduler:
    info = runner.info
    scheduler = Scheduler(
        ScheduleConfig(
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_step_tokens=budget,
        )
    )
    wanted = Sampling(**{"temperature": 0.0, "max_tokens": 1, **sampling})
    scheduler.add(SequenceSpec("a", prompt, wanted, seed=11, pool=pool))
    return scheduler


def tokens_of(updates: list[SequenceUpdate]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((got - expected).abs().max()) < 1e-4 * float(expected.std())


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in FAMILIES), (UNEVEN, 3), ("gemma3", 3)])
def test_logits_and_greedy_text_are_those_of_one(
    name: str, size: int, random_model: RandomModel, load_split: LoadSplit, tmp_path: Path
) -> None:
    family, config = FAMILIES[name]
    random_model(tmp_path, family, **config)
    files = open_files("tiny", tmp_path)
    alone = TorchRunner.load(files, CONFIG)
    expected = logits_of(alone, 64)
    with load_split(files, CONFIG, size) as runner:
        assert (runner.info.num_ranks, runner.info.vocab_size) == (size, 131)
        assert_close(logits_of(runner, 64), expected)
        assert_close(logits_of(runner, 7), expected)
        assert_close(logits_of(runner, 1, PROMPT[:9]), expected[:9])
        assert tokens_of(run(runner, 64, max_tokens=12)) == tokens_of(run(alone, 64, max_tokens=12))


def test_seeds_scores_and_pooled_vectors_are_those_of_one(
    random_model: RandomModel, load_split: LoadSplit, tmp_path: Path
) -> None:
    """Whatever goes through the head besides what is sampled, in the same order on every rank."""
    random_model(tmp_path, "qwen3", **UNTIED, head_dim=32)
    files = open_files("tiny", tmp_path)
    alone = TorchRunner.load(files, CONFIG)
    drawn: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 12}
    scored: dict[str, Any] = {"num_prompt_logprobs": 2, "num_logprobs": 3, "max_tokens": 6}
    with load_split(files, CONFIG, 3) as runner:
        assert tokens_of(run(runner, 64, **drawn)) == tokens_of(run(alone, 64, **drawn))
        for budget in (64, 7):
            ours, theirs = (run(each, budget, **scored) for each in (runner, alone))
            assert tokens_of(ours) == tokens_of(theirs)
            pairs = [
                [p.chosen for update in updates for p in (*(update.prompt_logprobs or ()), *(update.logprobs or ()))]
                for updates in (ours, theirs)
            ]
            assert len(pairs[0]) == len(PROMPT) - 1 + len(tokens_of(ours))
            np.testing.assert_allclose(pairs[0], pairs[1], atol=1e-4)
        sums = [run(each, 64, max_tokens=0, pool=True)[-1].pooled for each in (runner, alone)]
        assert sums[0] is not None and sums[1] is not None
        np.testing.assert_allclose(sums[0], sums[1], rtol=1e-4, atol=1e-3)


def test_deterministic_mode_keeps_its_bits_on_three_ranks(
    random_model: RandomModel, load_split: LoadSplit, tmp_path: Path
) -> None:
    random_model(tmp_path, "qwen2", **UNTIED)
    files = open_files("tiny", tmp_path)
    expected = logits_of(TorchRunner.load(files, CONFIG), 64)
    config = TorchConfig(dtype="fp32", num_blocks=64, block_size=8, deterministic=True)
    with load_split(files, config, 3) as runner:
        whole, cut = logits_of(runner, 64), logits_of(runner, 17)
        single = logits_of(runner, 1, PROMPT[:5])
    assert_close(whole, expected)
    assert torch.equal(cut, whole) and torch.equal(single, whole[:5])


def test_each_rank_has_its_part_of_weights_and_kv_memory(
    random_model: RandomModel, load_split: LoadSplit, tmp_path: Path
) -> None:
    """As many blocks as one process has in the same memory."""
    random_model(tmp_path, **UNTIED)
    files = open_files("tiny", tmp_path)
    config = TorchConfig(dtype="bf16", kv_memory_bytes=1_000_000)
    alone = TorchRunner.load(files, config).info
    with load_split(files, config, 2) as runner:
        info, own = runner.info, runner._own.info
    assert (info.num_blocks, info.kv_bytes) == (alone.num_blocks, alone.kv_bytes)
    assert own.kv_bytes == alone.kv_bytes / 2
    num_norms = 5 * 64 * 2
    assert info.weight_bytes == alone.weight_bytes + num_norms
    assert own.weight_bytes < 0.52 * alone.weight_bytes


def test_a_rank_that_hangs_in_a_step_is_noticed(random_model: RandomModel, tmp_path: Path) -> None:
    """It does not come to where the first one waits; nothing can be computed after that."""
    random_model(tmp_path)
    config = replace(CONFIG, num_threads=torch.get_num_threads())
    with RankProcesses(2) as processes:
        runner = LeadRunner.load(open_files("tiny", tmp_path), config, processes.ranks)
        try:
            processes.watch()
            run(runner, 64)
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))  # only now: until here nobody hangs
            os.kill(processes.pids[0], signal.SIGSTOP)
            for _ in range(2):
                with pytest.raises(EngineError, match="the 2 ranks cannot go on: "):
                    run(runner, 64)
            assert processes.ranks.lost.done()
        finally:
            ProcessGroup.leave()
    assert not psutil.pid_exists(processes.pids[0])

"""Blocks out of one runner and into another: the same bytes, hence the same answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from inferloop.core.request import Sampling
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.compute.runner import Runner
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import BlockData, BlockLoads, StepPlan
from inferloop.models.resolve import open_files

VOCAB, SIZE = 97, 4
PROMPT = tuple((5 * i * i + 3) % VOCAB for i in range(14))


def torch_runner(path: Path, **options: Any) -> TorchRunner:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    if not any(path.iterdir()):
        transformers.LlamaForCausalLM(config).save_pretrained(path)
    chosen: dict[str, Any] = {"dtype": "fp32", "num_blocks": 8, "block_size": SIZE, **options}
    return TorchRunner.load(open_files("tiny", path), TorchConfig(**chosen))


MAKERS: dict[str, Callable[[Path], Runner]] = {
    "echo": lambda _: EchoRunner(vocab_size=VOCAB, num_blocks=8, block_size=SIZE),
    "echo, two KV groups": lambda _: EchoRunner(vocab_size=VOCAB, num_blocks=8, block_size=SIZE, num_kv_groups=2),
    "torch fp32": torch_runner,
    "torch bf16": lambda path: torch_runner(path, dtype="bf16"),
}
if torch.cuda.is_available():
    MAKERS["torch fp32 on a GPU"] = lambda path: torch_runner(path, device="cuda")
    MAKERS["torch bf16 on a GPU"] = lambda path: torch_runner(path, device="cuda", dtype="bf16")


def prefill(runner: Runner) -> StepPlan:
    """The one step that computes the prompt in an empty cache."""
    scheduler = Scheduler(
        ScheduleConfig(
            vocab_size=VOCAB,
            context_length=64,
            block_size=SIZE,
            num_blocks=8,
            num_kv_groups=len(runner.info.kv_group_windows),
        )
    )
    scheduler.add(SequenceSpec("a", PROMPT, Sampling(temperature=0.0, max_tokens=1)))
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def without_beginning(plan: StepPlan, num: int) -> StepPlan:
    """The same step with its first `num` tokens taken for computed."""
    return replace(
        plan,
        token_ids=plan.token_ids[num:],
        offsets=np.array([0, plan.num_tokens - num], np.int32),
        first_positions=np.array([num], np.int32),
        sample_rows=plan.sample_rows - num,
    )


def run(runner: Runner, plan: StepPlan) -> tuple[list[int], tuple[BlockData, ...]]:
    runner.submit(plan)
    result = runner.wait()
    return result.tokens_of(0), result.saved


@pytest.mark.parametrize("kind", MAKERS)
def test_an_answer_goes_on_from_blocks_of_another_runner(kind: str, tmp_path: Path) -> None:
    first, second = (MAKERS[kind](tmp_path) for _ in range(2))
    plan = prefill(first)
    full = tuple(table[0, :3] for table in plan.block_tables)
    answer, saved = run(first, replace(plan, saves=full))
    assert [data.nbytes for data in saved] == [first.info.block_bytes] * 3
    assert len({data.tobytes() for data in saved}) == 3
    # In the second runner the same blocks lie elsewhere, and in another order.
    elsewhere = tuple(7 - table for table in plan.block_tables)
    loads = BlockLoads(tuple(table[0, [2, 0, 1]] for table in elsewhere), tuple(saved[i] for i in (2, 0, 1)))
    rest = replace(without_beginning(plan, 12), block_tables=elsewhere, loads=loads)
    again, back = run(second, replace(rest, saves=tuple(table[0, :3] for table in elsewhere)))
    assert again == answer
    assert [data.tobytes() for data in back] == [data.tobytes() for data in saved]
    # And it is what they hold that the answer comes from.
    last = tuple(table[0, 3:4] for table in elsewhere)
    zeros = replace(loads, data=tuple(np.zeros_like(data) for data in loads.data))
    right, wrong = (run(MAKERS[kind](tmp_path), replace(rest, loads=given, saves=last)) for given in (loads, zeros))
    assert (right[0], right[1][0].tobytes()) != (wrong[0], wrong[1][0].tobytes())


@pytest.mark.parametrize("kind", MAKERS)
def test_a_load_may_take_the_place_of_what_is_copied_away(kind: str, tmp_path: Path) -> None:
    runner = MAKERS[kind](tmp_path)
    plan = prefill(runner)
    groups = range(len(plan.block_tables))
    _, saved = run(runner, replace(plan, saves=tuple(table[0, :3] for table in plan.block_tables)))
    source = [int(table[0, 0]) for table in plan.block_tables]
    spare = 7
    replaced = replace(
        without_beginning(plan, 12),
        copies=tuple(np.array([[source[g], spare]], np.int32) for g in groups),
        loads=BlockLoads(tuple(np.array([source[g]], np.int32) for g in groups), (saved[2],)),
        saves=tuple(np.array([spare, source[g]], np.int32) for g in groups),
    )
    _, found = run(runner, replaced)
    assert [data.tobytes() for data in found] == [saved[0].tobytes(), saved[2].tobytes()]


def test_a_layout_says_what_a_block_depends_on(tmp_path: Path) -> None:
    plain = torch_runner(tmp_path).info.block_layout
    assert torch_runner(tmp_path, num_blocks=4).info.block_layout == plain
    others = [
        torch_runner(tmp_path, dtype="bf16").info.block_layout,
        torch_runner(tmp_path, block_size=8).info.block_layout,
        torch_runner(tmp_path, deterministic=True).info.block_layout,
    ]
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    others.append(torch_runner(tmp_path).info.block_layout)
    assert len({plain, *others}) == 5

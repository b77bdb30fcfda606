"""The torch runner on tiny random models: the same logits as transformers, whatever the architecture's variant."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inferloop.core.errors import EnvironmentLacksError, ModelFileError, UsageError
from inferloop.core.request import Sampling
from inferloop.engine.compute.runner import GiveUp, never
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.layers.linear import Linear
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import StepPlan
from inferloop.models.resolve import open_files

RandomModel = Callable[..., Any]
VOCAB = 131
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "explicit head_dim": ("llama", {"head_dim": 32}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "no grouping": ("llama", {"num_key_value_heads": 4}),
    "attention and mlp bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "yarn rope": ("llama", {"rope_parameters": YARN, "max_position_embeddings": 128}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
    "qwen2, qkv bias": ("qwen2", {}),
    "qwen3, qk norm": ("qwen3", {"head_dim": 32}),
}


def load(path: Path, **options: Any) -> TorchRunner:
    defaults: dict[str, Any] = {"dtype": "fp32", "num_blocks": 32, "block_size": 8}
    return TorchRunner.load(open_files("tiny", path), TorchConfig(**(defaults | options)))


class Later(GiveUp):
    """Up when it has been asked `num_asked` times."""

    def __init__(self, num_asked: int) -> None:
        super().__init__()
        self.left = num_asked

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def plans_of(runner: TorchRunner, prompt: tuple[int, ...], budget: int) -> list[StepPlan]:
    """The steps that compute a prompt in chunks of `budget` tokens; the runner runs them all but the last."""
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
    scheduler.add(SequenceSpec("a", prompt, Sampling(temperature=0.0, max_tokens=1)))
    plans = []
    while scheduler.request_ids:
        plan = scheduler.schedule()
        assert plan is not None
        plans.append(plan)
        runner.submit(plan)
        scheduler.commit(plan, runner.wait())
    return plans


def test_packed_weights_meet_few_row_counts(
    random_model: RandomModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs memory for good, and the rows that fill up change no other row."""
    random_model(tmp_path)
    runner = load(tmp_path, dtype="bf16")
    if not runner._decoder._in_buckets:
        pytest.skip("this machine does not pack bf16 weights")
    seen: set[int] = set()
    call = Linear.__call__

    def watched(linear: Linear, x: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.add(len(x))
        return call(linear, x, *more)

    for num in range(1, 127):
        prompt = tuple((7 * i + num) % VOCAB for i in range(num))
        with monkeypatch.context() as patched:
            patched.setattr(Linear, "__call__", watched)
            (plan,) = plans_of(runner, prompt, 256)
        filled_up = runner.logits(plan)[-1]
        with monkeypatch.context() as patched:
            patched.setattr(runner._decoder, "_in_buckets", False)
            exact = runner.logits(plan)[-1]
        torch.testing.assert_close(filled_up, exact, rtol=0.05, atol=0.2)
    assert len(seen) <= 32 + 8 + 8


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(
    variant: str, deterministic: bool, random_model: RandomModel, tmp_path: Path
) -> None:
    family, changes = VARIANTS[variant]
    model = random_model(tmp_path, family, **changes)
    runner = load(tmp_path, deterministic=deterministic)
    prompt = tuple(np.random.default_rng(1).integers(0, VOCAB, 45).tolist())
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    scale = float(expected.std())
    for budget in (45, 10, 1):
        got = torch.cat([runner.logits(plan) for plan in plans_of(runner, prompt, budget)])
        assert float((got - expected).abs().max()) < 1e-4 * scale, f"in chunks of {budget}"


def test_bf16_is_close(random_model: RandomModel, tmp_path: Path) -> None:
    model = random_model(tmp_path)
    runner = load(tmp_path, dtype="bf16")
    prompt = tuple(range(3, 43))
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    (plan,) = plans_of(runner, prompt, 64)
    got = runner.logits(plan).float()
    assert float((got - expected).abs().mean()) < 0.03 * float(expected.std())


def test_what_cannot_run_is_told(random_model: RandomModel, tmp_path: Path) -> None:
    random_model(tmp_path)
    with pytest.raises(UsageError, match="did you mean fp32"):
        load(tmp_path, dtype="fp3")
    with pytest.raises(UsageError, match="deterministic"):
        load(tmp_path, dtype="bf16", deterministic=True)
    with pytest.raises(UsageError, match="holds no block"):
        load(tmp_path, num_blocks=None, kv_memory_bytes=10)
    with pytest.raises(EnvironmentLacksError, match="nonsense"):
        load(tmp_path, device="nonsense")


def test_more_kv_memory_than_there_is_is_refused_before_it_is_taken(random_model: RandomModel, tmp_path: Path) -> None:
    random_model(tmp_path)
    with pytest.raises(EnvironmentLacksError, match=r"KV memory: .* are free\. Choose less"):
        load(tmp_path, num_blocks=1 << 36)


def test_info_counts_what_is_there(random_model: RandomModel, tmp_path: Path) -> None:
    model = random_model(tmp_path)
    runner = load(tmp_path, num_blocks=None, kv_memory_bytes=100_000)
    info = runner.info
    assert info.weight_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert info.num_blocks == 100_000 // (8 * 2 * 2 * 2 * 16 * 4)
    assert info.kv_bytes == info.num_blocks * 8 * 2 * 2 * 2 * 16 * 4
    assert (info.vocab_size, info.context_length, info.block_size) == (VOCAB, 1024, 8)


def test_loading_tells_its_progress(random_model: RandomModel, tmp_path: Path) -> None:
    random_model(tmp_path)
    seen: list[tuple[int, int]] = []
    files = open_files("tiny", tmp_path)
    TorchRunner.load(files, TorchConfig(dtype="fp32", num_blocks=4), progress=lambda n, of: seen.append((n, of)))
    num_bytes = sum(info.num_bytes for info in files.header.tensors.values())
    assert seen[-1] == (num_bytes, num_bytes)
    assert [n for n, _ in seen] == sorted({n for n, _ in seen})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loading_holds_little_beside_the_weights(dtype: str, random_model: RandomModel, tmp_path: Path) -> None:
    """Of what numpy holds, which is what was read and not yet put in place, and of each stacked matrix once."""
    random_model(tmp_path, vocab_size=20_000, hidden_size=256, intermediate_size=2048, tie_word_embeddings=False)
    files = open_files("tiny", tmp_path)
    size = files.header.tensors["lm_head.weight"].num_bytes
    assert size == 20_000 * 256 * 4
    threads = torch.get_num_threads()
    tracemalloc.start()
    runner = TorchRunner.load(files, TorchConfig(dtype=dtype, num_blocks=4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 4
    assert torch.get_num_threads() == threads
    assert runner.info.weight_bytes == sum(i.num_bytes for i in files.header.tensors.values()) // (
        1 if dtype == "fp32" else 2
    )


def test_a_model_that_changes_while_it_is_read_is_not_loaded(random_model: RandomModel, tmp_path: Path) -> None:
    random_model(tmp_path)
    weights = tmp_path / "model.safetensors"

    def exchange(num: int, total: int) -> None:
        (tmp_path / "new").write_bytes(weights.read_bytes())
        (tmp_path / "new").replace(weights)

    with pytest.raises(ModelFileError, match=r"model\.safetensors: was changed while it was read"):
        TorchRunner.load(open_files("tiny", tmp_path), TorchConfig(num_blocks=4), progress=exchange)


def test_matrices_that_are_packed_take_turns_in_one_place(
    random_model: RandomModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of many sizes that come and go between those that stay leave the heap full of holes."""
    made: list[tuple[Linear, torch.Tensor, int]] = []
    make = Linear.__init__

    def watched(linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        make(linear, weight, bias)
        made.append((linear, weight.clone(), weight.untyped_storage().data_ptr()))

    random_model(tmp_path)
    monkeypatch.setattr(Linear, "__init__", watched)
    if not load(tmp_path, dtype="bf16")._decoder._in_buckets:
        pytest.skip("this machine does not pack bf16 weights")
    assert len(made) == 1 + 2 * 4
    assert len({place for _, _, place in made[4:]}) == 1  # all but the head, and those before the largest
    for linear, weight, _ in made:
        x = torch.linspace(-1, 1, 3 * weight.shape[1]).reshape(3, -1).to(torch.bfloat16)
        torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_the_number_of_steps_and_nothing_else(
    temperature: float, random_model: RandomModel, tmp_path: Path
) -> None:
    random_model(tmp_path)
    runner = load(tmp_path, deterministic=True)
    wanted = Sampling(temperature=temperature, max_tokens=20, frequency_penalty=0.3, num_logprobs=1)

    def generate(truth: list[int] | None) -> tuple[list[int], list[float], int]:
        scheduler = Scheduler(ScheduleConfig(vocab_size=VOCAB, context_length=128, block_size=8, num_blocks=32))
        scheduler.add(SequenceSpec("a", (5, 6, 7), wanted, seed=9))
        tokens, logprobs, num_steps = list[int](), list[float](), 0
        while scheduler.request_ids:
            if truth is not None and tokens:
                right = truth[len(tokens) : len(tokens) + num_steps % 4]
                scheduler.propose("a", (*right, 0, 1))
            plan = scheduler.schedule()
            assert plan is not None
            runner.submit(plan)
            for update in scheduler.commit(plan, runner.wait()):
                assert update.logprobs is not None and len(update.logprobs) == len(update.token_ids)
                tokens += update.token_ids
                logprobs += [value.chosen for value in update.logprobs]
            num_steps += 1
        return tokens, logprobs, num_steps

    tokens, logprobs, num_steps = generate(None)
    drafted_tokens, drafted_logprobs, num_drafted_steps = generate(tokens)
    assert drafted_tokens == tokens
    assert drafted_logprobs == logprobs
    assert num_drafted_steps < num_steps


def test_a_step_that_was_given_up_leaves_no_trace(random_model: RandomModel, tmp_path: Path) -> None:
    """Between any two layers; computed again, everything is as if it had gone through at once."""
    random_model(tmp_path)
    runner = load(tmp_path, deterministic=True)
    wanted = Sampling(temperature=0.0, max_tokens=6, num_logprobs=1)

    def generate(num_asked: int) -> tuple[list[int], list[float], int]:
        """Every other step is given up when it has asked so often."""
        scheduler = Scheduler(ScheduleConfig(vocab_size=VOCAB, context_length=128, block_size=8, num_blocks=32))
        scheduler.add(SequenceSpec("a", (5, 6, 7) * 7, wanted, seed=9))
        tokens, logprobs, num_given_up = list[int](), list[float](), 0
        for num_steps in itertools.count():
            plan = scheduler.schedule()
            if plan is None:
                return tokens, logprobs, num_given_up
            runner.submit(plan, Later(num_asked) if num_steps % 2 == 0 else never)
            result = runner.wait()
            num_given_up += result.given_up
            for update in scheduler.commit(plan, result):
                assert update.logprobs is not None
                tokens += update.token_ids
                logprobs += [value.chosen for value in update.logprobs]
            scheduler.check()
        raise AssertionError

    whole = generate(99)
    assert whole[2] == 0
    for num_asked in range(6):  # twice in each of two layers, before the head, before sampling
        assert generate(num_asked) == (*whole[:2], 6)

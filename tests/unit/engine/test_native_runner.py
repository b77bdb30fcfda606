"""The native runner on tiny random models: what transformers computes, and the same bits whatever happens around it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inferloop.core.errors import EnvironmentLacksError, ModelFileError, UsageError
from inferloop.core.request import Sampling
from inferloop.engine.compute.runner import GiveUp, Runner, never
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import BlockData, BlockLoads, PromptRows, SparseRows, StepPlan
from inferloop.models.resolve import ModelFiles, open_files

_native = pytest.importorskip("inferloop.engine.compute.native._native")
from inferloop.engine.compute.native.config import NativeConfig  # noqa: E402
from inferloop.engine.compute.native.pack import pack_model  # noqa: E402
from inferloop.engine.compute.native.program import check_runs  # noqa: E402
from inferloop.engine.compute.native.runner import NativeRunner  # noqa: E402

RandomModel = Callable[..., Any]
VOCAB = 131
ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
LEVELS = ISAS[: ISAS.index(_native.best_isa()) + 1]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "wide heads": ("llama", {"head_dim": 48, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "no grouping": ("llama", {"num_key_value_heads": 4}),
    "attention and mlp bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2, qkv bias": ("qwen2", {}),
    "qwen3, qk norm": ("qwen3", {"head_dim": 32}),
    "mistral, window": ("mistral", {"sliding_window": 24}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, random_model: RandomModel) -> ModelFiles:
    path = tmp_path_factory.mktemp("tiny")
    random_model(path)
    return open_files("tiny", path)


def load(files: ModelFiles, **options: Any) -> NativeRunner:
    """Two threads, so that it does not depend on the machine, and weights packed into memory."""
    defaults: dict[str, Any] = {"weights": "fp32", "num_blocks": 64, "num_threads": 2}
    config = NativeConfig(**(defaults | options))
    return NativeRunner(files.header, pack_model(files.header, config.weights), config)


def scheduler_of(runner: Runner, **options: Any) -> Scheduler:
    info = runner.info
    defaults: dict[str, Any] = {
        "vocab_size": info.vocab_size,
        "context_length": info.context_length,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
    }
    return Scheduler(ScheduleConfig(**(defaults | options)))


Answer = tuple[list[int], list[float]]


def generate(
    runner: Runner,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling | Sequence[Sampling],
    *,
    preempted: list[int] | None = None,
    **options: Any,
) -> list[Answer]:
    """Tokens of each prompt, and their log-probabilities if asked for."""
    scheduler = scheduler_of(runner, **options)
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    for i, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
        scheduler.add(SequenceSpec(str(i), prompt, wanted, seed=wanted.seed or 0))
    answers: list[Answer] = [([], []) for _ in prompts]
    while scheduler.request_ids:
        plan = scheduler.schedule()
        assert plan is not None
        runner.submit(plan)
        for update in scheduler.commit(plan, runner.wait()):
            tokens, logprobs = answers[int(update.request_id)]
            tokens += update.token_ids
            logprobs += [value.chosen for value in update.logprobs or ()]
        scheduler.check()
    if preempted is not None:
        preempted.append(scheduler.num_preemptions)
    return answers


def prompts_of(lengths: Sequence[int], seed: int = 3) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, VOCAB) for _ in range(length)) for length in lengths]


def plans_of(runner: Runner, prompt: tuple[int, ...], budget: int) -> list[StepPlan]:
    """The steps that compute a prompt in chunks of `budget` tokens; the runner has run them all."""
    scheduler = scheduler_of(runner, max_step_tokens=budget)
    scheduler.add(SequenceSpec("a", prompt, Sampling(temperature=0.0, max_tokens=1)))
    plans = []
    while scheduler.request_ids:
        plan = scheduler.schedule()
        assert plan is not None
        plans.append(plan)
        runner.submit(plan)
        scheduler.commit(plan, runner.wait())
    return plans


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, random_model: RandomModel, tmp_path: Path) -> None:
    """But for keys and values in bf16, which is what the bound is for."""
    family, changes = VARIANTS[variant]
    model = random_model(tmp_path, family, **changes)
    prompt = prompts_of([45])[0]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    scale = float(expected.std())
    for isa in LEVELS:
        runner = load(open_files("tiny", tmp_path), isa=isa)
        for budget in (45, 10, 1):
            got = np.concatenate([runner.logits(plan) for plan in plans_of(runner, prompt, budget)])
            assert float(np.abs(got - expected).max()) < 0.02 * scale, f"{isa}, in chunks of {budget}"


@pytest.mark.parametrize(("weights", "kv"), [("stored", "bf16"), ("int8", "bf16"), ("int8", "int8")])
def test_shorter_forms_are_close(
    weights: str, kv: str, files: ModelFiles, random_model: RandomModel, tmp_path: Path
) -> None:
    model = random_model(tmp_path)
    prompt = prompts_of([45])[0]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    for isa in LEVELS:
        runner = load(files, weights=weights, kv=kv, isa=isa)
        (plan,) = plans_of(runner, prompt, 64)
        assert float(np.abs(runner.logits(plan) - expected).mean()) < 0.03 * float(expected.std()), isa


CLASSES = [("fp32", "bf16"), ("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8")]
WANTED = (
    Sampling(temperature=0.0, max_tokens=24, num_logprobs=0),
    Sampling(temperature=0.8, seed=42, max_tokens=24, num_logprobs=0),
    Sampling(temperature=1.0, seed=7, max_tokens=24, top_p=0.9, num_logprobs=0),
    Sampling(temperature=1.3, seed=7, max_tokens=24, top_k=40, min_p=0.02, num_logprobs=0),
    Sampling(temperature=0.7, seed=9, max_tokens=24, frequency_penalty=0.5, repetition_penalty=1.1, num_logprobs=0),
    Sampling(temperature=0.0, max_tokens=24, num_logprobs=0, logit_bias=((5, 2.0),)),
    Sampling(temperature=1.0, seed=3, max_tokens=24, num_logprobs=0),
    Sampling(temperature=0.0, max_tokens=24, num_logprobs=0),
)
LENGTHS = (40, 3, 333, 17, 1, 64, 100, 16)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(("weights", "kv"), CLASSES)
def test_answers_do_not_depend_on_what_happens_around_them(weights: str, kv: str, isa: str, files: ModelFiles) -> None:
    """Alone or in company, in chunks of any size, preempted, cached before, on one to three threads: the same bits."""
    prompts = prompts_of(LENGTHS)
    one = load(files, weights=weights, kv=kv, isa=isa, num_threads=1)
    alone = [generate(one, [p], s)[0] for p, s in zip(prompts, WANTED, strict=True)]
    assert all(tokens and len(tokens) == len(logprobs) for tokens, logprobs in alone)
    runner = load(files, weights=weights, kv=kv, isa=isa)
    assert generate(runner, prompts, WANTED, max_step_tokens=256) == alone
    assert generate(runner, prompts[::-1], WANTED[::-1], max_step_tokens=64)[::-1] == alone
    three = load(files, weights=weights, kv=kv, isa=isa, num_threads=3)
    assert generate(three, prompts, WANTED, max_step_tokens=23) == alone
    few: list[int] = []
    tight = load(files, weights=weights, kv=kv, isa=isa, num_blocks=26)
    assert generate(tight, prompts, WANTED, preempted=few, context_length=400) == alone
    assert few[0] > 0, "nobody was preempted"


def test_a_token_at_a_time_gives_the_bits_of_a_whole_prompt(files: ModelFiles) -> None:
    for weights, kv in CLASSES:
        runner = load(files, weights=weights, kv=kv)
        prompt = prompts_of([300])[0]
        whole = [np.concatenate([runner.logits(p) for p in plans_of(runner, prompt, n)]) for n in (300, 256, 7, 1)]
        for other in whole[1:]:
            np.testing.assert_array_equal(other, whole[0])


def test_a_cached_beginning_gives_the_same_answer(files: ModelFiles) -> None:
    runner = load(files, weights="int8")
    prompt = prompts_of([70])[0]
    wanted = Sampling(temperature=0.0, max_tokens=8, num_logprobs=0)
    scheduler = scheduler_of(runner)
    answers: list[Answer] = []
    for name in "ab":
        scheduler.add(SequenceSpec(name, prompt, wanted))
        tokens, logprobs, num_cached = list[int](), list[float](), 0
        while scheduler.request_ids:
            plan = scheduler.schedule()
            assert plan is not None
            runner.submit(plan)
            for update in scheduler.commit(plan, runner.wait()):
                tokens += update.token_ids
                logprobs += [value.chosen for value in update.logprobs or ()]
                num_cached = update.num_cached_tokens
        answers.append((tokens, logprobs))
    assert num_cached >= 64
    assert answers[0] == answers[1]


def test_seeded_draws_are_those_of_the_torch_runner(files: ModelFiles) -> None:
    """Logits differ by roundings only, and noise is the same: so are the tokens."""
    wanted = [replace(s, num_logprobs=2) for s in WANTED]
    prompts = prompts_of(LENGTHS)
    config = TorchConfig(dtype="fp32", deterministic=True, num_blocks=64, block_size=16)
    theirs = generate(TorchRunner.load(files, config), prompts, wanted)
    ours = generate(load(files), prompts, wanted)
    agreed = sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True))
    assert agreed >= len(prompts) - 1, "a near tie may flip, no more"
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(ours, theirs, strict=True):
        if tokens == other_tokens:
            assert logprobs == pytest.approx(other_logprobs, abs=0.05)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_the_number_of_steps_and_nothing_else(temperature: float, files: ModelFiles) -> None:
    runner = load(files)
    wanted = Sampling(temperature=temperature, max_tokens=20, frequency_penalty=0.3, num_logprobs=1, ignore_eos=True)

    def answer(truth: list[int] | None) -> tuple[list[int], list[float], int]:
        scheduler = scheduler_of(runner)
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
                tokens += update.token_ids
                logprobs += [value.chosen for value in update.logprobs or ()]
            num_steps += 1
        return tokens, logprobs, num_steps

    tokens, logprobs, num_steps = answer(None)
    drafted = answer(tokens)
    assert drafted[:2] == (tokens, logprobs)
    assert drafted[2] < num_steps


def test_a_step_that_is_given_up_loses_nothing(files: ModelFiles) -> None:
    runner = load(files)
    up = GiveUp()
    up.set()
    scheduler = scheduler_of(runner)
    wanted = Sampling(temperature=0.0, max_tokens=6)
    scheduler.add(SequenceSpec("a", (5, 6, 7) * 7, wanted))
    tokens, num_given_up = list[int](), 0
    for num_steps in itertools.count():
        plan = scheduler.schedule()
        if plan is None:
            break
        runner.submit(plan, up if num_steps % 2 == 0 else never)
        result = runner.wait()
        num_given_up += result.given_up
        for update in scheduler.commit(plan, result):
            tokens += update.token_ids
        scheduler.check()
    assert num_given_up == 6
    assert tokens == generate(runner, [(5, 6, 7) * 7], wanted)[0][0]


def test_prompt_scores_and_sums_equal_transformers(
    files: ModelFiles, random_model: RandomModel, tmp_path: Path
) -> None:
    model = random_model(tmp_path)
    prompts = prompts_of([90, 40])
    runner = load(files)
    for budget in (256, 33):
        scheduler = scheduler_of(runner, max_step_tokens=budget)
        wanted = Sampling(temperature=0.0, max_tokens=1, num_prompt_logprobs=3)
        scheduler.add(SequenceSpec("0", prompts[0], wanted))
        scheduler.add(SequenceSpec("1", prompts[1], Sampling(temperature=0.0, max_tokens=0), pool=True))
        scores, pooled = None, None
        while scheduler.request_ids:
            plan = scheduler.schedule()
            assert plan is not None
            runner.submit(plan)
            for update in scheduler.commit(plan, runner.wait()):
                if update.request_id == "0" and update.prompt_logprobs is not None:
                    scores = update.prompt_logprobs
                if update.request_id == "1" and update.pooled is not None:
                    pooled = update.pooled
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor([prompts[0]])).logits[0].double(), -1)
            hidden = model.model(torch.tensor([prompts[1]])).last_hidden_state[0].double().sum(0).numpy()
        assert scores is not None and len(scores) == len(prompts[0]) - 1
        for i, score in enumerate(scores):
            assert score.chosen == pytest.approx(float(table[i, prompts[0][i + 1]]), abs=0.1)
            assert score.rank is not None and len(score.top) == 3
            better = int((table[i] > table[i, prompts[0][i + 1]]).sum()) + 1
            assert abs(score.rank - better) <= 3
        assert pooled is not None
        scale = float(np.abs(hidden).max())
        assert np.abs(np.asarray(pooled) - hidden).max() < 0.02 * scale


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_blocks_move_out_and_into_another_runner(kv: str, files: ModelFiles) -> None:
    source, target = load(files, kv=kv), load(files, kv=kv, num_threads=1)
    assert source.info.block_layout == target.info.block_layout
    other = load(files, kv="bf16" if kv == "int8" else "int8")
    assert source.info.block_layout != other.info.block_layout
    prompt = prompts_of([40])[0]
    scheduler = scheduler_of(source)
    scheduler.add(SequenceSpec("a", prompt, Sampling(temperature=0.0, max_tokens=1)))
    plan = scheduler.schedule()
    assert plan is not None

    def run(runner: Runner, plan: StepPlan) -> tuple[list[int], tuple[BlockData, ...]]:
        runner.submit(plan)
        result = runner.wait()
        return result.tokens_of(0), result.saved

    blocks = plan.block_tables[0][0, :2].copy()
    tokens, saved = run(source, replace(plan, saves=(blocks,)))
    assert [data.nbytes for data in saved] == [source.info.block_bytes] * 2
    # Elsewhere, in another order, beside a copy that makes room for them.
    table = np.array([[9, 3, 6]], np.int32)
    rest = replace(
        plan,
        token_ids=plan.token_ids[32:],
        offsets=np.array([0, 8], np.int32),
        first_positions=np.array([32], np.int32),
        sample_rows=plan.sample_rows - 32,
        block_tables=(table,),
        loads=BlockLoads((np.array([3, 9], np.int32),), (saved[1], saved[0])),
        saves=(np.array([3, 9], np.int32),),
    )
    again, kept = run(target, rest)
    assert again == tokens
    assert [data.tobytes() for data in kept] == [saved[1].tobytes(), saved[0].tobytes()]
    # Every source is read before any destination is written.
    swap, turned = np.array([[3, 9], [9, 3]], np.int32), np.array([[3, 9, 6]], np.int32)
    swapped = replace(rest, copies=(swap,), loads=None, block_tables=(turned,))
    again, kept = run(target, swapped)
    assert again == tokens
    assert [data.tobytes() for data in kept] == [saved[0].tobytes(), saved[1].tobytes()]


def test_what_cannot_run_is_told(files: ModelFiles, random_model: RandomModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no block"):
        load(files, num_blocks=None, kv_memory_bytes=10)
    with pytest.raises(EnvironmentLacksError, match=r"KV memory: .* are free.* Choose less"):
        load(files, num_blocks=1 << 36)
    refused: dict[str, tuple[dict[str, Any], str]] = {
        "heads": ({"head_dim": 24}, "heads of a multiple of 16, these are of 24"),
        "ffn": ({"intermediate_size": 80}, "32 for the feed-forward size, which is 80"),
    }
    for name, (changes, told) in refused.items():
        random_model(tmp_path / name, **changes)
        with pytest.raises(ModelFileError, match=told):
            check_runs(open_files("tiny", tmp_path / name).header)


def test_info_counts_what_is_there(files: ModelFiles) -> None:
    info = load(files, num_blocks=None, kv_memory_bytes=100_000).info
    block_bytes = 2 * 2 * (2 * 16 * 16 * 2)
    assert (info.block_bytes, info.num_blocks) == (block_bytes, 100_000 // block_bytes)
    assert info.kv_bytes == info.num_blocks * block_bytes
    assert info.deterministic and info.can_give_up
    assert info.dtype == "fp32 weights, fp32 activations, bf16 kv"


def prompt_rows(flat: int, target: int) -> PromptRows:
    return PromptRows(*(np.array([number], np.int32) for number in (flat, 0, target, 0)))


def bias(begin: int, token: int) -> SparseRows:
    return SparseRows(np.array([begin, 1], np.int32), np.array([token], np.int32), np.zeros(1, np.float32))


def test_a_broken_plan_is_refused(files: ModelFiles) -> None:
    """Native code reads where a plan points, so it is checked first."""
    runner = load(files)
    scheduler = scheduler_of(runner)
    scheduler.add(SequenceSpec("a", prompts_of([40])[0], Sampling(temperature=0.0, max_tokens=1)))
    plan = scheduler.schedule()
    assert plan is not None
    for broken in (
        replace(plan, token_ids=plan.token_ids + VOCAB),
        replace(plan, token_ids=plan.token_ids.astype(np.int64)),
        replace(plan, first_positions=np.array([10_000], np.int32)),
        replace(plan, block_tables=(np.full_like(plan.block_tables[0], 64),)),
        replace(plan, offsets=np.array([0, 41], np.int32)),
        replace(plan, sample_rows=np.array([40], np.int32)),
        replace(plan, num_drafts=np.array([1], np.int32)),
        replace(plan, pooled=np.array([1], np.int32)),
        replace(plan, prompt_rows=prompt_rows(39, VOCAB)),
        replace(plan, prompt_rows=prompt_rows(40, 5)),
        replace(plan, sampling=replace(plan.sampling, bias=bias(0, VOCAB))),
        replace(plan, sampling=replace(plan.sampling, bias=bias(1, 5))),
    ):
        with pytest.raises(ValueError):
            load(files).submit(broken)

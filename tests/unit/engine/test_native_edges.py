"""The native runner where plans, memory, threads and processes end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from inferloop.core.errors import EnvironmentLacksError, UsageError
from inferloop.engine.schedule.step import PromptRows, SamplingColumns, StepPlan, UInt32
from inferloop.models.resolve import ModelFiles, open_files

_native = pytest.importorskip("inferloop.engine.compute.native._native")
from inferloop.engine.compute.native.config import NativeConfig  # noqa: E402
from inferloop.engine.compute.native.pack import pack_model  # noqa: E402
from inferloop.engine.compute.native.runner import NativeRunner  # noqa: E402

RandomModel = Callable[..., Any]
VOCAB = 131
ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
LEVELS = ISAS[: ISAS.index(_native.best_isa()) + 1]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, random_model: RandomModel) -> ModelFiles:
    path = tmp_path_factory.mktemp("tiny")
    random_model(path)
    return open_files("tiny", path)


def load(files: ModelFiles, **options: Any) -> NativeRunner:
    defaults: dict[str, Any] = {"weights": "fp32", "num_blocks": 64, "num_threads": 2}
    config = NativeConfig(**(defaults | options))
    return NativeRunner(files.header, pack_model(files.header, config.weights), config)


def int32(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def greedy(n: int, **changes: Any) -> SamplingColumns:
    zeros = np.zeros(n, np.float32)
    return SamplingColumns(
        temperature=zeros,
        top_p=zeros + 1,
        top_k=np.zeros(n, np.int32),
        min_p=zeros,
        seed=np.zeros(n, np.uint64),
        num_logprobs=np.full(n, -1, np.int32),
        **changes,
    )


def plan_of(*token_ids: int, **changes: Any) -> StepPlan:
    """One sequence from its beginning, in blocks 0, 1, ..., sampled after its last token."""
    num = len(token_ids)
    plan = StepPlan(
        step_id=1,
        slots=int32(0),
        offsets=int32(0, num),
        token_ids=int32(*token_ids),
        first_positions=int32(0),
        block_tables=(np.arange(-(-num // 16), dtype=np.int32)[None],),
        sample_rows=int32(num - 1),
        num_drafts=int32(0),
        sampling=greedy(1),
    )
    return replace(plan, **changes)


def nothing(**changes: Any) -> StepPlan:
    """A plan of no sequence."""
    none = int32()
    return StepPlan(1, none, int32(0), none, none, (np.empty((0, 1), np.int32),), none, none, greedy(0), **changes)


def test_more_rows_may_be_asked_for_than_there_are_tokens(files: ModelFiles) -> None:
    runner, num = load(files), 20_000
    flat = np.repeat(int32(1, 3), num // 2)
    rows = PromptRows(flat, np.zeros_like(flat), np.full_like(flat, 5), np.full_like(flat, 2))
    runner.submit(plan_of(5, 6, 7, 8, prompt_rows=rows))
    result = runner.wait()
    assert len(result.tokens_of(0)) == 1 and len(result.prompt_logprobs) == num
    first, second = set(result.prompt_logprobs[: num // 2]), set(result.prompt_logprobs[num // 2 :])
    assert len(first) == len(second) == 1 and first != second


def test_a_step_without_tokens_moves_blocks(files: ModelFiles) -> None:
    runner = load(files)
    runner.submit(plan_of(*range(5, 21)))
    runner.wait()
    copies, saves = np.array([[0, 7]], np.int32), int32(0, 7)
    runner.submit(nothing(copies=(copies,), saves=(saves,)))
    result = runner.wait()
    assert result.token_ids.size == 0 and result.offsets.tolist() == [0]
    assert result.saved[0].tobytes() == result.saved[1].tobytes() and result.saved[0].any()
    assert runner.logits(nothing()).shape == (0, VOCAB)


def test_after_a_step_that_failed_comes_another(files: ModelFiles) -> None:
    runner = load(files)
    runner.submit(plan_of(5, 6, 7))
    expected = runner.wait().tokens_of(0)
    broken: Future[UInt32] = Future()
    broken.set_exception(LookupError("no grammar"))
    short: Future[UInt32] = Future()
    short.set_result(np.full((1, 2), 0xFFFF_FFFF, np.uint32))
    for mask, problem in ((broken, LookupError), (short, ValueError)):
        with pytest.raises(problem):
            runner.submit(plan_of(5, 6, 7, sampling=greedy(1, mask=mask)))
    with pytest.raises(ValueError):
        runner.submit(plan_of(5, 6, VOCAB))
    runner.submit(plan_of(5, 6, 7))
    assert runner.wait().tokens_of(0) == expected


def test_numbers_near_the_largest_are_refused(files: ModelFiles) -> None:
    runner, most = load(files), 2**31 - 1
    for changes in (
        {"first_positions": int32(most)},
        {"first_positions": int32(most - 1)},
        {"num_drafts": int32(most)},
        {"sample_rows": int32(most), "num_drafts": int32(most)},
        {"offsets": int32(-most, 3)},
    ):
        with pytest.raises(ValueError):
            runner.submit(plan_of(5, 6, 7, **changes))


def test_numbers_of_another_kind_are_refused(files: ModelFiles) -> None:
    runner, plan = load(files), plan_of(5, 6, 7)
    others: tuple[Any, ...] = (
        plan.token_ids.astype(">i4"),  # the same size in another order
        plan.token_ids.astype(np.float32),
        plan.token_ids.astype(np.int64),
        np.repeat(plan.token_ids, 2)[::2],
        plan.token_ids.view([("id", np.int32)]),
    )
    for token_ids in others:
        with pytest.raises(ValueError):
            runner.submit(replace(plan, token_ids=token_ids))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 300, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
        ("qwen3", {"head_dim": 128, "tie_word_embeddings": False}),
        ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 160}),
    ],
)
def test_long_prompts_equal_transformers(
    family: str, changes: dict[str, Any], random_model: RandomModel, tmp_path: Path
) -> None:
    """Over several ranges of keys, and further than a window reaches."""
    model = random_model(tmp_path, family, **changes)
    token_ids = np.random.default_rng(3).integers(3, VOCAB, 700).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0].numpy()
    plan = plan_of(*token_ids)
    for isa in LEVELS:
        runner = load(open_files("tiny", tmp_path), isa=isa)
        runner.submit(plan)
        runner.wait()
        last = replace(
            plan,
            offsets=int32(0, 40),
            token_ids=plan.token_ids[660:],
            first_positions=int32(660),
            sample_rows=int32(39),
        )
        for got, truth in ((runner.logits(last), expected[660:]), (runner.logits(plan), expected)):
            assert float(np.abs(got - truth).max()) < 0.02 * float(expected.std()), isa


@contextmanager
def address_space(spare_bytes: int) -> Iterator[None]:
    """The system gives no more than so much."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + spare_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_system_that_gives_no_memory_or_threads_is_told_of(files: ModelFiles) -> None:
    packed = pack_model(files.header, "fp32")
    with (
        address_space(256 << 20),
        pytest.raises(EnvironmentLacksError, match=r"no room for .* of KV memory"),
    ):
        NativeRunner(files.header, packed, NativeConfig(num_blocks=(1 << 30) >> 13, num_threads=1))
    with (
        address_space(256 << 20),
        pytest.raises(EnvironmentLacksError, match="does not give 500 threads"),
    ):
        NativeRunner(files.header, packed, NativeConfig(num_blocks=8, num_threads=500))
    with pytest.raises(UsageError, match="not -1"):
        load(files, num_threads=-1)


def test_a_forked_copy_is_told_that_it_has_no_threads(files: ModelFiles) -> None:
    runner = load(files)
    child = os.fork()
    if child == 0:  # nothing of pytest's may run here
        signal.alarm(30)  # rather than hang
        code = 1
        try:
            runner.submit(plan_of(5, 6, 7))
        except RuntimeError as error:
            code = 0 if "forked" in str(error) else 2
        del runner
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    runner.submit(plan_of(5, 6, 7))
    assert len(runner.wait().tokens_of(0)) == 1


def test_a_process_may_end_in_the_middle_of_a_step(files: ModelFiles) -> None:
    script = """
import sys, threading
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_native_edges import load, open_files, plan_of
runner = load(open_files("tiny", Path(sys.argv[1])))
plan = plan_of(*(5 + i % 100 for i in range(1000)))
begun = threading.Event()
def step():
    while True:
        runner.submit(plan)
        begun.set()
        runner.wait()
threading.Thread(target=step, daemon=True).start()
begun.wait()
"""
    folder = files.header.tensors["model.norm.weight"].file.parent
    command = [sys.executable, "-c", script, str(folder), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")

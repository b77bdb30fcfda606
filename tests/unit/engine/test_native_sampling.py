"""Native sampling: the portable level against the torch sampler, every other level against the portable one bit for
bit, and the same again whoever takes which slice of the vocabulary."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferloop.engine.compute.philox import gumbel_all
from inferloop.engine.compute.torch.prompts import read_scores, score
from inferloop.engine.compute.torch.sampler import logprobs_of, sample, sample_rows
from inferloop.engine.schedule.step import PromptRows, SamplingColumns, SparseRows, StepPlan

_native = pytest.importorskip("inferloop.engine.compute.native._native")

sampling = _native.sampling
Floats = NDArray[np.float32]
Found = dict[str, Any]
ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
LEVELS = ISAS[: ISAS.index(_native.best_isa()) + 1]
ARRAYS = ("token_ids", "accepted", "logprobs", "ranks", "top_offsets", "top_ids", "top_logprobs")


@dataclass(frozen=True, slots=True)
class Case:
    """Logits of the rows to sample, then of the prompts' rows."""

    plan: StepPlan
    logits: Floats
    mask: NDArray[np.uint32] | None = None

    @property
    def vocab(self) -> int:
        return int(self.logits.shape[1])


def plan_of(n: int, *, drafts: list[int] | None = None, tokens: list[int] | None = None, **columns: Any) -> StepPlan:
    """n sequences with one known token and their drafts, at positions 10, 1010, 2010, 10, and so on."""
    num_drafts = drafts or [0] * n
    offsets = np.cumsum([0, *(1 + d for d in num_drafts)]).astype(np.int32)
    defaults: dict[str, Any] = {
        "temperature": np.ones(n, np.float32),
        "top_p": np.ones(n, np.float32),
        "top_k": np.zeros(n, np.int32),
        "min_p": np.zeros(n, np.float32),
        "seed": np.arange(n, dtype=np.uint64) * 0x9E3779B97F4A7C15,
        "num_logprobs": np.full(n, -1, np.int32),
    }
    return StepPlan(
        step_id=1,
        slots=np.arange(n, dtype=np.int32),
        offsets=offsets,
        token_ids=np.array(tokens if tokens is not None else [0] * int(offsets[-1]), np.int32),
        first_positions=(10 + np.arange(n, dtype=np.int32) % 3 * 1000).astype(np.int32),
        block_tables=(np.zeros((n, 200), np.int32),),
        sample_rows=offsets[:-1].copy(),
        num_drafts=np.array(num_drafts, np.int32),
        sampling=SamplingColumns(**(defaults | columns)),
    )


def run(case: Case, isa: str = "scalar", *, num_threads: int = 1, **how: Any) -> Found:
    bench = sampling.Bench(isa, case.vocab, num_threads)
    bench.load(case.logits)
    found: Found = bench.run(case.plan, case.mask, **how)
    return found


def assert_same(found: Found, other: Found) -> None:
    for name in ARRAYS:
        assert found[name].tobytes() == other[name].tobytes(), name


def draw(logits: Floats, **columns: Any) -> list[int]:
    """One token of each row, on every level."""
    case = Case(plan_of(len(logits), **columns), np.ascontiguousarray(logits, np.float32))
    found = run(case)
    for isa in LEVELS[1:]:
        assert_same(run(case, isa), found)
    tokens: list[int] = found["token_ids"].tolist()
    return tokens


def sparse(rng: np.random.Generator, n: int, vocab: int, values: list[float]) -> SparseRows:
    counts = rng.integers(0, min(vocab, 40) + 1, n) * rng.integers(0, 2, n)
    ids = [rng.choice(vocab, count, replace=False) for count in counts]
    flat = np.concatenate([*ids, np.empty(0)]).astype(np.int32)
    return SparseRows(np.cumsum([0, *counts]).astype(np.int32), flat, rng.choice(values, len(flat)).astype(np.float32))


def random_case(seed: int, n: int, vocab: int, *, plain: bool = False, prompts: int = 0) -> Case:
    """Everything that a plan can ask for, `plain` without what changes logits. Coarse logits make ties."""
    rng = np.random.default_rng(seed)
    drafts = rng.integers(0, 3, n).tolist()
    num_rows = n + sum(drafts)
    prompts = prompts if n else 0
    logits = rng.normal(0, rng.choice([0.1, 1, 3, 10]), (num_rows + prompts, vocab))
    if rng.integers(2):
        logits = np.round(logits * 2) / 2
    columns: dict[str, Any] = {
        "temperature": rng.choice([0, 1e-5, 0.1, 0.7, 1, 1.3, 5], n).astype(np.float32),
        "top_k": rng.choice([0, 0, 1, 2, 50, vocab - 1, vocab], n).astype(np.int32),
        "top_p": rng.choice([1, 1, 0.999, 0.9, 0.5, 1e-6], n).astype(np.float32),
        "min_p": rng.choice([0, 0, 0.02, 0.3, 1], n).astype(np.float32),
        "seed": rng.integers(0, 2**64, n, dtype=np.uint64),
    }
    mask = None
    if not plain:
        columns["num_logprobs"] = rng.choice([-1, -1, 0, 1, 5, vocab], n).astype(np.int32)
        if rng.integers(2):
            columns["bias"] = sparse(rng, n, vocab, [-100, -1, 0.25, 4, -np.inf])
        if rng.integers(2):
            columns["penalties"] = sparse(rng, n, vocab, [0, 1, 2, 7])
            columns["presence"] = rng.choice([0, 0.5, -1], n).astype(np.float32)
            columns["frequency"] = rng.choice([0, 0.25, -0.5], n).astype(np.float32)
            columns["repetition"] = rng.choice([1, 1.25, 0.8], n).astype(np.float32)
        if rng.integers(2):
            mask = rng.integers(0, 2**32, (n, -(-vocab // 32)), dtype=np.uint32)
            mask[:, 0] |= 1
            future: Future[NDArray[np.uint32]] = Future()
            future.set_result(mask)
            columns["mask"] = future
    plan = plan_of(n, drafts=drafts, tokens=rng.integers(0, min(vocab, 20), num_rows).tolist(), **columns)
    if prompts:
        rows = PromptRows(
            flat=np.sort(rng.integers(0, num_rows, prompts)).astype(np.int32),
            owners=np.zeros(prompts, np.int32),
            targets=rng.integers(0, vocab, prompts).astype(np.int32),
            num_top=rng.choice([0, 1, 3, vocab], prompts).astype(np.int32),
        )
        plan = replace(plan, prompt_rows=rows)
    return Case(plan, logits.astype(np.float32), mask)


CASES = st.builds(
    random_case,
    seed=st.integers(0, 2**32),
    n=st.integers(0, 6),
    vocab=st.sampled_from([1, 2, 63, 64, 65, 130, 777, 1024, 4100]),
    plain=st.booleans(),
    prompts=st.integers(0, 3),
)


def tops(found: Found, row: int) -> list[tuple[int, float]]:
    some = slice(found["top_offsets"][row], found["top_offsets"][row + 1])
    return list(zip(found["top_ids"][some].tolist(), found["top_logprobs"][some].tolist(), strict=True))


def assert_likeliest(
    ours: list[tuple[int, float]], theirs: tuple[tuple[int, float], ...], logits: torch.Tensor
) -> None:
    """Equals may come in any order from torch, and from us by id."""
    values = [value for _, value in ours]
    assert values == pytest.approx([value for _, value in theirs], abs=1e-5, rel=1e-6, nan_ok=True)
    own = torch.log_softmax(logits, -1)[[token for token, _ in ours]].tolist()
    assert values == pytest.approx(own, abs=1e-5, rel=1e-6, nan_ok=True)
    ranked = [(-float(logits[token]), token) for token, _ in ours]
    assert ranked == sorted(set(ranked))


@settings(max_examples=250)
@given(CASES)
def test_it_is_the_torch_sampler(case: Case) -> None:
    plan, rows = case.plan, sample_rows(case.plan)
    found = run(case)
    num = len(rows.flat)
    if num:
        ids, processed = sample(torch.from_numpy(case.logits[:num].copy()), plan, rows)
        assert found["token_ids"].tolist() == ids.tolist()
        wanted = plan.sampling.num_logprobs[rows.owners].tolist()
        for row, expected in enumerate(logprobs_of(processed, ids, wanted)):
            assert (expected is None) == (wanted[row] < 0)
            if expected is not None:
                assert found["logprobs"][row] == pytest.approx(expected.chosen, abs=1e-5, rel=1e-6, nan_ok=True)
                assert_likeliest(tops(found, row), expected.top, processed[row])
    if plan.prompt_rows is not None:
        logits = torch.from_numpy(case.logits[num:])
        everything = replace(plan.prompt_rows, flat=np.arange(len(logits), dtype=np.int32))
        for row, told in enumerate(read_scores(score(logits, everything, lambda hidden: hidden), everything), num):
            assert found["logprobs"][row] == pytest.approx(told.chosen, abs=1e-5, rel=1e-6)
            assert found["ranks"][row] == told.rank
            assert_likeliest(tops(found, row), told.top, logits[row - num])


@settings(max_examples=150)
@given(CASES, st.randoms(use_true_random=False))
def test_nothing_depends_on_levels_threads_or_slices(case: Case, random: Any) -> None:
    expected = run(case)
    ends = sorted({case.vocab, *(random.randrange(0, case.vocab, 64) for _ in range(5))} - {0})
    slices = [(random.randrange(3), begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    random.shuffle(slices)
    for isa in LEVELS:
        assert_same(run(case, isa), expected)
        assert_same(run(case, isa, num_threads=3, slices=slices, rows_at_once=random.randrange(1, 5)), expected)


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40), num_ids=st.integers(1, 700))
def test_noise_has_the_bits_of_numpy(isa: str, seed: int, position: int, num_ids: int) -> None:
    ours = sampling.gumbel(isa, seed, position, num_ids)
    assert ours.tobytes() == gumbel_all(seed, position, num_ids).tobytes()


@pytest.mark.parametrize("isa", LEVELS)
def test_noise_of_much(isa: str) -> None:
    assert sampling.gumbel(isa, 7, 3, 2_000_000).tobytes() == gumbel_all(7, 3, 2_000_000).tobytes()


@pytest.mark.parametrize("spread", [0.05, 1.0, 3.0, 20.0])
def test_rows_as_wide_as_a_vocabulary(spread: float) -> None:
    """Draws from most of 49,152 entries, from few, and with every filter; two threads."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, spread, (8, 49152)).astype(np.float32)
    columns: dict[str, Any] = {
        "temperature": np.array([0, 1, 0.3, 2, 1, 1, 1, 0.8], np.float32),
        "top_k": np.array([0, 0, 0, 0, 50, 0, 3000, 50], np.int32),
        "top_p": np.array([1, 1, 1, 1, 1, 0.9, 0.99, 0.9], np.float32),
        "min_p": np.array([0, 0, 0, 0.05, 0, 0, 0, 0.01], np.float32),
    }
    case = Case(plan_of(8, **columns), logits)
    expected = sample(torch.from_numpy(logits.copy()), case.plan, sample_rows(case.plan))[0].tolist()
    for isa in LEVELS:
        assert run(case, isa, num_threads=2)["token_ids"].tolist() == expected


def test_of_equals_the_smallest_id_wins() -> None:
    logits = np.zeros((2, 1000), np.float32)
    logits[:, [999, 300, 64, 65]] = 2.0
    logits[1, 64] = -0.0
    assert draw(logits, temperature=np.zeros(2, np.float32)) == [64, 65]
    logits[:] = -0.0
    logits[:, 500:] = 0.0
    assert draw(logits, temperature=np.zeros(2, np.float32)) == [0, 0]


def kept(logits: Any, **filters: float) -> set[int]:
    """Which tokens ever come out over many seeds."""
    num = 3000
    columns: dict[str, Any] = {k: np.full(num, v, np.int32 if k == "top_k" else np.float32) for k, v in filters.items()}
    seed = np.arange(num, dtype=np.uint64)
    return set(draw(np.tile(np.asarray(logits, np.float32), (num, 1)), seed=seed, **columns))


def test_filters_leave_what_they_should() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04]))
    assert kept(logits) == {0, 1, 2, 3, 4}
    assert kept(logits, top_k=1) == {0}
    assert kept(logits, top_k=2) == {0, 1}
    assert kept(logits, top_k=99) == {0, 1, 2, 3, 4}
    assert kept(logits, top_p=0.65) == {0, 1}
    assert kept(logits, top_p=0.75) == {0, 1, 2}
    assert kept(logits, top_p=1 - 2.0**-24) == {0, 1, 2, 3, 4}
    assert kept(logits, top_p=1e-6) == kept(logits, top_p=0.0) == {0}
    assert kept(logits, min_p=0.45) == {0, 1, 2}
    assert kept(logits, min_p=1.0) == {0}
    assert kept(logits, top_k=3, top_p=0.7) == {0, 1}, "top-p counts the probability that top-k left"
    assert kept(logits, min_p=0.45, top_p=0.7) == {0, 1}
    assert kept([1, 2, 2, 0, 2], top_k=2) == {1, 2, 4}, "equals of the last one kept"
    assert kept([1, 2, 2, 0, 2], top_p=0.4) == {1, 2, 4}


def test_top_p_counts_what_can_never_win() -> None:
    """Entries that are each hopeless decide together whether the second is needed."""
    num = 64
    logits = np.full((num, 50_000), -19.5, np.float32)
    logits[:, 0], logits[:, 1] = 0.0, -1.0
    tail = 49_998 * np.exp(-19.5)
    for part, expected in ((1.01, {0}), (0.5, {0, 1})):
        top_p = np.full(num, 1 / (1 + np.exp(-1.0) + part * tail), np.float32)
        assert set(draw(logits, top_p=top_p)) == expected


def masked(logits: Floats, allowed: list[int], **columns: Any) -> Case:
    n, vocab = logits.shape
    mask = np.zeros((n, -(-vocab // 32)), np.uint32)
    for token in allowed:
        mask[:, token // 32] |= np.uint32(1 << token % 32)
    future: Future[NDArray[np.uint32]] = Future()
    future.set_result(mask)
    return Case(plan_of(n, mask=future, **columns), logits, mask)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("vocab", [40, 64, 1000, 50257])
def test_a_mask_that_allows_little(vocab: int, isa: str) -> None:
    logits = np.random.default_rng(1).normal(0, 3, (4, vocab)).astype(np.float32)
    filters: dict[str, Any] = {
        "temperature": np.array([0, 1, 1, 1], np.float32),
        "top_k": np.array([0, 0, 50, 0], np.int32),
        "top_p": np.array([1, 1, 1, 0.9], np.float32),
        "num_logprobs": np.full(4, 3, np.int32),
    }
    last = vocab - 1
    found = run(masked(logits, [last], **filters), isa)
    assert found["token_ids"].tolist() == [last] * 4
    assert found["logprobs"].tolist() == [0.0] * 4
    assert tops(found, 2) == [(last, 0.0), (0, -np.inf), (1, -np.inf)], "as many as were asked for"
    assert set(run(masked(logits, [5, 17, last], **filters), isa)["token_ids"].tolist()) <= {5, 17, last}
    nothing = run(masked(logits, [], **filters | {"num_logprobs": np.full(4, -1, np.int32)}), isa)
    assert nothing["token_ids"].tolist() == [0] * 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_logits_give_a_token_all_the_same(bad: float) -> None:
    rng = np.random.default_rng(2)
    columns: dict[str, Any] = {
        "temperature": np.array([0, 1, 1, 1, 1], np.float32),
        "top_k": np.array([0, 0, 5, 0, 0], np.int32),
        "top_p": np.array([1, 1, 1, 0.9, 1], np.float32),
        "num_logprobs": np.array([-1, -1, -1, -1, 70], np.int32),
    }
    for share in (0.01, 0.5, 1.0):
        logits = rng.normal(0, 3, (5, 70)).astype(np.float32)
        logits[rng.random(logits.shape) < share] = bad
        for isa in LEVELS:
            found = run(Case(plan_of(5, **columns), logits), isa)
            assert all(0 <= token < 70 for token in found["token_ids"].tolist())
            assert sorted(token for token, _ in tops(found, 4)) == list(range(70))
            if share < 1 and bad != np.inf:
                assert np.isfinite(logits[np.arange(5), found["token_ids"]]).all()


def test_infinite_logits_are_the_likeliest() -> None:
    logits = np.random.default_rng(4).normal(0, 3, (3, 700)).astype(np.float32)
    for row, some in enumerate([slice(0, 700, 2), slice(35), slice(500, 501)]):
        logits[row, some] = np.inf
    plan = plan_of(3, temperature=np.zeros(3, np.float32), num_logprobs=np.full(3, 40, np.int32))
    expected = np.argsort(-logits, kind="stable")[:, :40]
    for isa in LEVELS:
        found = run(Case(plan, logits), isa)
        for row in range(3):
            assert [token for token, _ in tops(found, row)] == expected[row].tolist()


def test_drafts_count_up_to_the_first_that_was_not_drawn() -> None:
    logits = np.zeros((8, 100), np.float32)
    for row, token in enumerate([7, 8, 9, 10, 50, 51, 52, 60]):
        logits[row, token] = 5.0
    plan = plan_of(3, drafts=[3, 2, 0], tokens=[1, 7, 8, 3, 1, 4, 51, 1], temperature=np.zeros(3, np.float32))
    for isa in LEVELS:
        found = run(Case(plan, logits), isa)
        assert found["token_ids"].tolist() == [7, 8, 9, 10, 50, 51, 52, 60]
        assert found["accepted"].tolist() == [1, 1, 1, 0, 1, 0, 0, 1]


def test_a_sampled_row_may_be_anywhere_in_its_chunk() -> None:
    """The position that a token will have keys its noise. Of two chunks the one that begins at 100 is sampled last."""
    logits = np.random.default_rng(3).normal(0, 1, (1, 300)).astype(np.float32)
    plan = plan_of(2, temperature=np.ones(2, np.float32))
    plan = replace(
        plan,
        offsets=np.array([0, 4, 9], np.int32),
        token_ids=np.zeros(9, np.int32),
        first_positions=np.array([0, 100], np.int32),
        sample_rows=np.array([-1, 8], np.int32),
    )
    seed = int(plan.sampling.seed[1])
    expected = int((logits[0] + gumbel_all(seed, 105, 300)).argmax())
    assert run(Case(plan, logits))["token_ids"].tolist() == [expected]


def test_more_full_rows_than_are_kept_at_once() -> None:
    """Rows of 1 MiB go through in several batches: some that are drawn, some that only are looked through, prompts."""
    vocab, n, prompts = 2**18, 24, 4
    logits = np.random.default_rng(6).normal(0, 2, (n + prompts, vocab)).astype(np.float32)
    temperature = np.where(np.arange(n) % 4 == 0, 0, 1).astype(np.float32)
    plan = plan_of(n, temperature=temperature, top_k=np.full(n, 40, np.int32))
    targets = np.arange(prompts, dtype=np.int32)
    rows = PromptRows(targets, np.zeros(prompts, np.int32), targets, np.full(prompts, 2, np.int32))
    plan = replace(plan, prompt_rows=rows)
    expected = sample(torch.from_numpy(logits[:n].copy()), plan, sample_rows(plan))[0].tolist()
    found = run(Case(plan, logits), LEVELS[-1], num_threads=2)
    assert found["token_ids"].tolist() == expected
    table = torch.log_softmax(torch.from_numpy(logits[n:]).double(), -1)
    for row in range(prompts):
        assert found["logprobs"][n + row] == pytest.approx(float(table[row, row]), abs=1e-6)
        assert [token for token, _ in tops(found, n + row)] == table[row].topk(2).indices.tolist()


@pytest.mark.parametrize("isa", LEVELS)
def test_log_probabilities_are_exact_to_fp32(isa: str) -> None:
    """Flat rows, peaked ones, and many that are each next to nothing."""
    rng = np.random.default_rng(9)
    logits = np.stack(
        [np.zeros(50_000), rng.normal(0, 1, 50_000), rng.normal(0, 8, 50_000), np.r_[20.0, np.zeros(49_999)]]
    ).astype(np.float32)
    plan = plan_of(4, temperature=np.zeros(4, np.float32), num_logprobs=np.full(4, 8, np.int32))
    found = run(Case(plan, logits), isa)
    table = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    for row in range(4):
        assert found["logprobs"][row] == pytest.approx(float(table[row].max()), abs=2e-7, rel=1e-7)
        for token, value in tops(found, row):
            assert value == pytest.approx(float(table[row, token]), abs=2e-7, rel=1e-7)


def test_a_sampler_is_used_again() -> None:
    """For another number of rows, and without what the step before asked for."""
    bench = sampling.Bench(LEVELS[-1], 777, 2)
    for seed in range(20):
        case = random_case(seed, seed % 5, 777, plain=seed % 3 == 0, prompts=seed % 2)
        bench.load(case.logits)
        assert_same(bench.run(case.plan, case.mask), run(case))

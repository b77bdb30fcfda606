"""Plans keep what does not change from step to step; they must not differ from plans made from nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inferloop.core.request import BATCH_PRIORITY, Sampling
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.schedule.columns import sampling_columns
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import SparseRows, StepPlan, UInt32

VOCAB = 53
CONFIG = ScheduleConfig(
    vocab_size=VOCAB,
    context_length=64,
    block_size=4,
    num_blocks=14,
    eos_token_ids=(3,),
    max_step_tokens=12,
    max_sequences=4,
    max_waiting=64,
)
"""Few blocks, so that sequences give way and come back in other slots."""

SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7]),
    top_k=st.sampled_from([0, 5]),
    max_tokens=st.integers(1, 14),
    min_tokens=st.integers(0, 1),
    num_logprobs=st.sampled_from([None, None, 2]),
    num_prompt_logprobs=st.sampled_from([None, None, None, 1]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([(), (), ((5, 1.0),)]),
)


class OddMask:
    """Allows one token, another one after each."""

    failed = False

    def __init__(self) -> None:
        self.num_accepted = 0

    def fill(self, row: UInt32) -> None:
        row[:] = 0
        row[self.num_accepted % VOCAB // 32] = 1 << self.num_accepted % 32

    def accept(self, token_ids: list[int]) -> None:
        self.num_accepted += len(token_ids)


KINDS = st.sampled_from(["", "", "", "mask", "pool"])
PRIORITIES = st.sampled_from([0, 0, 0, BATCH_PRIORITY])
SPEC = st.tuples(SAMPLING, st.integers(1, 20), st.integers(0, 2**64 - 1), PRIORITIES, KINDS)
ARRIVALS = st.lists(st.tuples(st.integers(0, 12), SPEC), min_size=1, max_size=8)
"""With after how many steps each comes."""


def same(a: object, b: object) -> bool:
    if isinstance(a, SparseRows) and isinstance(b, SparseRows):
        return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(SparseRows))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a is None and b is None


def freeze(value: object) -> dict[str, object]:
    """Copies of all arrays of a plan, which nobody can write to any more."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        part = getattr(value, field.name)
        if isinstance(part, np.ndarray):
            part.flags.writeable = False
            found[field.name] = part.tolist()
        elif field.name == "block_tables":
            found[field.name] = [table.tolist() for table in part]
        elif field.name != "mask":
            found[field.name] = freeze(part)
    return found


def check(scheduler: Scheduler, plan: StepPlan) -> None:
    """Every column, from what the sequences say."""
    chunks = scheduler._chunks
    sequences = [sequence for sequence, _ in chunks]
    starts, ends = [s.num_computed for s in sequences], [s.num_computed + num for s, num in chunks]
    token_ids = [[*s.token_ids[a:b], *s.drafts] for s, a, b in zip(sequences, starts, ends, strict=True)]
    offsets = np.cumsum([0, *map(len, token_ids)])
    assert plan.token_ids.tolist() == [token for some in token_ids for token in some]
    assert plan.offsets.tolist() == offsets.tolist()
    assert plan.first_positions.tolist() == starts
    assert plan.slots.tolist() == [s.slot for s in sequences]
    assert plan.num_drafts.tolist() == [len(s.drafts) for s in sequences]
    assert plan.sample_rows.tolist() == [
        offset - 1 - len(s.drafts) if end == s.num_known and s.generates else -1
        for s, end, offset in zip(sequences, ends, offsets[1:], strict=True)
    ]
    pooled = [i for i, s in enumerate(sequences) if s.spec.pool]
    assert (plan.pooled.tolist() if plan.pooled is not None else []) == pooled
    masks = [s.spec.mask if row >= 0 else None for s, row in zip(sequences, plan.sample_rows, strict=True)]
    assert (plan.sampling.mask is not None) == any(masks)
    if plan.sampling.mask is not None:
        expected = np.full((len(masks), 2), 0xFFFF_FFFF, np.uint32)
        for row, mask in zip(expected, masks, strict=True):
            if mask is not None:
                mask.fill(row)
        assert np.array_equal(plan.sampling.mask.result(), expected)
    to_score = [len(s.to_score(num)) for s, num in chunks]
    assert (0 if plan.prompt_rows is None else len(plan.prompt_rows.flat)) == sum(to_score)
    assert all(column.dtype == np.int32 for column in (plan.slots, plan.offsets, plan.token_ids, plan.first_positions))
    assert all(column.dtype == np.int32 for column in (plan.sample_rows, plan.num_drafts))
    fresh = sampling_columns(sequences, VOCAB)
    for field in dataclasses.fields(fresh):
        if field.name != "mask":
            assert same(getattr(plan.sampling, field.name), getattr(fresh, field.name)), field.name


@given(ARRIVALS, st.integers(0, 30), st.lists(st.integers(0, 3), max_size=5))
@settings(max_examples=150, deadline=None)
def test_plans_are_as_if_made_from_nothing(
    arrivals: list[tuple[int, tuple[Sampling, int, int, int, str]]], abort_at: int, guesses: list[int]
) -> None:
    scheduler = Scheduler(CONFIG)
    runner = EchoRunner(vocab_size=VOCAB, context_length=64, block_size=4, num_blocks=CONFIG.num_blocks)
    arrivals = sorted(arrivals, key=lambda a: a[0])
    plan: StepPlan | None = None
    frozen = dict[str, object]()
    for num_steps in range(1000):
        while arrivals and arrivals[0][0] <= num_steps:
            _, (sampling, num_prompt, seed, priority, kind) = arrivals.pop(0)
            name = f"r{len(arrivals)}"
            prompt = tuple((5 * i + seed) % VOCAB for i in range(num_prompt))
            if kind == "pool":
                sampling = Sampling(max_tokens=0)
            mask = OddMask() if kind == "mask" else None
            scheduler.add(
                SequenceSpec(name, prompt, sampling, seed=seed, priority=priority, mask=mask, pool=kind == "pool")
            )
        if num_steps == abort_at and scheduler.request_ids:
            scheduler.abort(scheduler.request_ids[0])
        if not scheduler.request_ids:
            if not arrivals:
                return
            continue
        if guesses and scheduler.request_ids:
            scheduler.propose(scheduler.request_ids[-1], (7,) * guesses.pop())
        before, plan = plan, scheduler.schedule()
        if plan is None:
            continue
        check(scheduler, plan)
        assert before is None or freeze(before) == frozen, "a plan was written to"
        frozen = freeze(plan)
        runner.submit(plan)  # which finds every token through the block tables
        scheduler.commit(plan, runner.wait())
        scheduler.check()
    raise AssertionError("it does not end")


def test_columns_stay_once_an_end_may_come() -> None:
    scheduler = Scheduler(CONFIG)
    runner = EchoRunner(vocab_size=VOCAB, context_length=64, block_size=4, num_blocks=CONFIG.num_blocks)
    scheduler.add(
        SequenceSpec("a", (1, 2, 4), Sampling(max_tokens=9, min_tokens=3, ignore_eos=True, stop_token_ids=(3,)))
    )
    columns = []
    while (plan := scheduler.schedule()) is not None:
        columns.append(plan.sampling)
        runner.submit(plan)
        scheduler.commit(plan, runner.wait())
    assert [c.bias is not None for c in columns] == [True] * 3 + [False] * 6
    assert all(c is columns[3] for c in columns[3:])

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
from inferloop.engine.schedule.step import SparseRows, StepPlan

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
SPEC = st.tuples(SAMPLING, st.integers(1, 20), st.integers(0, 2**64 - 1), st.sampled_from([0, 0, 0, BATCH_PRIORITY]))
ARRIVALS = st.lists(st.tuples(st.integers(0, 12), SPEC), min_size=1, max_size=8)
"""With after how many steps each comes."""


def same(a: object, b: object) -> bool:
    if isinstance(a, SparseRows) and isinstance(b, SparseRows):
        return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(SparseRows))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a is None and b is None


def check(scheduler: Scheduler, plan: StepPlan) -> None:
    """Every column, from what the sequences say."""
    chunks = scheduler._chunks
    sequences = [sequence for sequence, _ in chunks]
    starts, ends = [s.num_computed for s in sequences], [s.num_computed + num for s, num in chunks]
    token_ids = [s.token_ids[a:b] for s, a, b in zip(sequences, starts, ends, strict=True)]
    offsets = np.cumsum([0, *map(len, token_ids)])
    assert plan.token_ids.tolist() == [token for some in token_ids for token in some]
    assert plan.offsets.tolist() == offsets.tolist()
    assert plan.first_positions.tolist() == starts
    assert plan.slots.tolist() == [s.slot for s in sequences]
    assert plan.num_drafts.tolist() == [0] * len(sequences)
    assert plan.sample_rows.tolist() == [
        offset - 1 if end == s.num_known else -1 for s, end, offset in zip(sequences, ends, offsets[1:], strict=True)
    ]
    to_score = [len(s.to_score(num)) for s, num in chunks]
    assert (0 if plan.prompt_rows is None else len(plan.prompt_rows.flat)) == sum(to_score)
    assert all(column.dtype == np.int32 for column in (plan.slots, plan.offsets, plan.token_ids, plan.first_positions))
    assert all(column.dtype == np.int32 for column in (plan.sample_rows, plan.num_drafts))
    fresh = sampling_columns(sequences, VOCAB)
    for field in dataclasses.fields(fresh):
        assert same(getattr(plan.sampling, field.name), getattr(fresh, field.name)), field.name


@given(ARRIVALS, st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_plans_are_as_if_made_from_nothing(
    arrivals: list[tuple[int, tuple[Sampling, int, int, int]]], abort_at: int
) -> None:
    scheduler = Scheduler(CONFIG)
    runner = EchoRunner(vocab_size=VOCAB, context_length=64, block_size=4, num_blocks=CONFIG.num_blocks)
    arrivals = sorted(arrivals, key=lambda a: a[0])
    for num_steps in range(1000):
        while arrivals and arrivals[0][0] <= num_steps:
            _, (sampling, num_prompt, seed, priority) = arrivals.pop(0)
            name = f"r{len(arrivals)}"
            prompt = tuple((5 * i + seed) % VOCAB for i in range(num_prompt))
            scheduler.add(SequenceSpec(name, prompt, sampling, seed=seed, priority=priority))
        if num_steps == abort_at and scheduler.request_ids:
            scheduler.abort(scheduler.request_ids[0])
        if not scheduler.request_ids:
            if not arrivals:
                return
            continue
        plan = scheduler.schedule()
        if plan is None:
            continue
        check(scheduler, plan)
        runner.submit(plan)  # which finds every token through the block tables
        scheduler.commit(plan, runner.wait())
        scheduler.check()
    raise AssertionError("it does not end")

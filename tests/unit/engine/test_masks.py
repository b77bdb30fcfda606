"""Masks in the schedule: who gets one, when it moves on, and what becomes of it under pressure."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from inferloop.core.request import Sampling
from inferloop.engine.compute.echo import EchoRunner, continuation
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec, SequenceUpdate
from inferloop.engine.schedule.step import StepPlan, UInt32

VOCAB = 97
ALL = 0xFFFF_FFFF


@dataclass
class CountingMask:
    """Its row says how many tokens it has taken."""

    fail_after: int | None = None
    taken: list[int] = field(default_factory=list)
    num_fills: int = 0

    @property
    def failed(self) -> bool:
        return self.fail_after is not None and len(self.taken) >= self.fail_after

    def fill(self, row: UInt32) -> None:
        self.num_fills += 1
        row[:] = 0
        row[0] = 1 + len(self.taken)

    def accept(self, token_ids: list[int]) -> None:
        self.taken += token_ids


def scheduler(num_blocks: int = 64) -> tuple[Scheduler, EchoRunner]:
    config = ScheduleConfig(
        vocab_size=VOCAB,
        context_length=64,
        block_size=4,
        num_blocks=num_blocks,
        max_step_tokens=8,
        max_sequences=4,
        share_prefixes=False,
    )
    return Scheduler(config), EchoRunner(vocab_size=VOCAB, context_length=64, block_size=4, num_blocks=num_blocks)


def spec(name: str, num_prompt: int, mask: CountingMask | None, max_tokens: int = 6) -> SequenceSpec:
    prompt = tuple((7 * i + ord(name)) % VOCAB for i in range(num_prompt))
    return SequenceSpec(name, prompt, Sampling(max_tokens=max_tokens), mask=mask)


def step(s: Scheduler, runner: EchoRunner) -> tuple[StepPlan, list[SequenceUpdate]]:
    plan = s.schedule()
    assert plan is not None
    runner.submit(plan)
    updates = s.commit(plan, runner.wait())
    s.check()
    return plan, updates


def test_a_step_without_masks_has_no_column_and_one_with_them_leaves_others_free() -> None:
    s, runner = scheduler()
    s.add(spec("a", 2, None))
    assert step(s, runner)[0].sampling.mask is None
    mask = CountingMask()
    s.add(spec("b", 3, mask))
    plan, _ = step(s, runner)
    assert plan.sampling.mask is not None
    rows = plan.sampling.mask.result()
    assert rows.dtype == np.uint32 and rows.shape == (2, 4)
    assert rows.tolist() == [[ALL] * 4, [1, 0, 0, 0]]
    plan, _ = step(s, runner)
    assert plan.sampling.mask is not None and plan.sampling.mask.result()[1].tolist() == [2, 0, 0, 0]


def test_no_mask_is_computed_for_a_chunk_that_samples_nothing() -> None:
    s, runner = scheduler()
    mask = CountingMask()
    s.add(spec("a", 20, mask))  # three steps of at most 8 tokens
    for _ in range(2):
        assert step(s, runner)[0].sampling.mask is None
    assert mask.num_fills == 0
    plan, _ = step(s, runner)
    assert plan.sampling.mask is not None and mask.num_fills == 1


def test_a_mask_follows_exactly_the_tokens_that_are_kept_also_through_preemption() -> None:
    s, runner = scheduler(num_blocks=7)
    masks = {name: CountingMask() for name in "abc"}
    specs = [spec(name, 5, masks[name], max_tokens=15) for name in "abc"]
    for one in specs:
        s.add(one)
    tokens: dict[str, list[int]] = {name: [] for name in "abc"}
    while s.request_ids:
        for update in step(s, runner)[1]:
            tokens[update.request_id] += update.token_ids
    assert s.num_preemptions > 0
    for one in specs:
        name = one.request_id
        assert masks[name].taken == tokens[name] == continuation(one.prompt_token_ids, 15, VOCAB)
        assert masks[name].num_fills == 15


def test_drafts_are_not_verified_under_a_mask_which_is_for_one_position() -> None:
    s, runner = scheduler()
    asked = spec("a", 3, CountingMask())
    s.add(asked)
    step(s, runner)
    s.propose("a", tuple(continuation(asked.prompt_token_ids, 3, VOCAB)[1:]))
    plan, updates = step(s, runner)
    assert plan.num_drafts.tolist() == [0]
    assert len(updates[0].token_ids) == 1


def test_a_mask_that_fails_ends_its_sequence_as_an_error_and_no_other() -> None:
    s, runner = scheduler()
    s.add(spec("a", 3, CountingMask(fail_after=2)))
    s.add(spec("b", 3, CountingMask()))
    ends: dict[str, str] = {}
    while s.request_ids:
        ends |= {u.request_id: u.finish_reason for u in step(s, runner)[1] if u.finish_reason}
    assert ends == {"a": "error", "b": "length"}
    assert s.num_blocks_used == 0


def test_a_step_does_not_wait_for_its_masks_but_what_it_is_sampled_from_does() -> None:
    """Planning, and all that a runner does before sampling, goes on while a mask is computed."""
    gate = threading.Event()

    class Slow(CountingMask):
        def fill(self, row: UInt32) -> None:
            assert gate.wait(10)
            super().fill(row)

        def accept(self, token_ids: list[int]) -> None:
            assert self.num_fills == 1 + len(self.taken), "moved on before it was filled"
            super().accept(token_ids)

    s, runner = scheduler()
    mask = Slow()
    s.add(spec("a", 3, mask))
    plan = s.schedule()
    assert plan is not None and plan.sampling.mask is not None and not plan.sampling.mask.done()
    runner.submit(plan)  # looks at no mask
    result = runner.wait()
    threading.Timer(0.05, gate.set).start()
    s.commit(plan, result)
    assert mask.num_fills == len(mask.taken) == 1


def test_a_mask_that_breaks_ends_the_step() -> None:
    class Broken(CountingMask):
        def fill(self, row: UInt32) -> None:
            raise RuntimeError("out of order")

    s, runner = scheduler()
    s.add(spec("a", 3, Broken()))
    with pytest.raises(RuntimeError, match="out of order"):
        step(s, runner)


def test_the_thread_for_masks_ends_with_the_engine() -> None:
    before = set(threading.enumerate())
    s, runner = scheduler()
    s.add(spec("a", 2, CountingMask()))
    step(s, runner)
    (thread,) = set(threading.enumerate()) - before
    s.close()
    thread.join(30.0)
    assert not thread.is_alive()

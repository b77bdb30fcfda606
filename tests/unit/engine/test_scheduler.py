"""The scheduler's rules, each on a workload small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inferloop.core.errors import ContextLengthError, OverloadedError, RequestError
from inferloop.core.request import Sampling
from inferloop.engine.compute.echo import EchoRunner, continuation
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec, SequenceUpdate
from inferloop.engine.schedule.step import StepPlan, StepResult

VOCAB = 97


def config(**changes: object) -> ScheduleConfig:
    base: dict[str, object] = {
        "vocab_size": VOCAB,
        "context_length": 64,
        "block_size": 4,
        "num_blocks": 32,
        "max_step_tokens": 16,
        "max_sequences": 4,
        "max_waiting": 8,
    }
    return ScheduleConfig(**(base | changes))  # type: ignore[arg-type]


def spec(name: str, num_prompt: int = 5, *, priority: int = 0, **sampling: object) -> SequenceSpec:
    prompt = tuple((7 * i + len(name)) % VOCAB for i in range(num_prompt))
    return SequenceSpec(name, prompt, Sampling(**sampling), priority=priority)  # type: ignore[arg-type]


def runner_for(scheduler: Scheduler) -> EchoRunner:
    c = scheduler.config
    return EchoRunner(
        vocab_size=c.vocab_size, context_length=c.context_length, block_size=c.block_size, num_blocks=c.num_blocks
    )


def step(scheduler: Scheduler, runner: EchoRunner) -> tuple[StepPlan, list[SequenceUpdate]]:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check()
    runner.submit(plan)
    updates = scheduler.commit(plan, runner.wait())
    scheduler.check()
    return plan, updates


def drain(scheduler: Scheduler, runner: EchoRunner) -> dict[str, list[SequenceUpdate]]:
    seen: dict[str, list[SequenceUpdate]] = {}
    while scheduler.request_ids:
        for update in step(scheduler, runner)[1]:
            seen.setdefault(update.request_id, []).append(update)
    return seen


def answer(plan: StepPlan, rows: list[list[int]]) -> StepResult:
    offsets = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32)
    return StepResult(plan.step_id, offsets, np.array([t for row in rows for t in row], np.int32))


def test_prompt_chunks_and_decode_share_a_step() -> None:
    scheduler = Scheduler(config())
    runner = runner_for(scheduler)
    scheduler.add(spec("a", 4, max_tokens=8))
    step(scheduler, runner)
    scheduler.add(spec("long", 20, max_tokens=2))
    plan, _ = step(scheduler, runner)
    assert np.diff(plan.offsets).tolist() == [1, 15]
    assert plan.sample_rows.tolist() == [0, -1]
    plan, _ = step(scheduler, runner)
    assert np.diff(plan.offsets).tolist() == [1, 5]
    assert plan.first_positions.tolist() == [5, 15]
    assert plan.sample_rows.tolist() == [0, 5]


def test_who_goes_through_one_adapter_lies_side_by_side_and_gets_its_own_tokens() -> None:
    scheduler = Scheduler(config())
    runner = runner_for(scheduler)
    slots = {"a": 1, "bb": -1, "ccc": 0, "dddd": 1}
    for name, slot in slots.items():
        scheduler.add(replace(spec(name, 3, max_tokens=3, temperature=0.0, ignore_eos=True), adapter_slot=slot))
    plan, updates = step(scheduler, runner)
    assert plan.adapters is not None and plan.adapters.tolist() == [-1, 0, 1, 1]
    assert [update.request_id for update in updates] == ["bb", "ccc", "a", "dddd"]
    assert [list(update.token_ids) for update in updates] == [
        continuation(spec(update.request_id, 3).prompt_token_ids, 1, VOCAB) for update in updates
    ]


def test_a_waiting_head_that_does_not_fit_is_not_overtaken() -> None:
    scheduler = Scheduler(config(num_blocks=8))
    runner = runner_for(scheduler)
    scheduler.add(spec("a", 16, max_tokens=4))
    step(scheduler, runner)
    scheduler.add(spec("big", 20, max_tokens=2))
    scheduler.add(spec("tiny", 1, max_tokens=1))
    order = list[str]()
    while scheduler.request_ids:
        step(scheduler, runner)
        order += scheduler.changes.admitted
    assert order == ["big", "tiny"]


def test_priority_goes_before_arrival() -> None:
    scheduler = Scheduler(config(max_sequences=1))
    runner = runner_for(scheduler)
    for name, priority in (("late", 5), ("first", 0), ("urgent", -1), ("second", 0)):
        scheduler.add(spec(name, priority=priority, max_tokens=1))
    order = list[str]()
    while scheduler.request_ids:
        step(scheduler, runner)
        order += scheduler.changes.admitted
    assert order == ["urgent", "first", "second", "late"]


def test_preemption_takes_the_last_and_keeps_its_tokens() -> None:
    scheduler = Scheduler(config(num_blocks=5))
    runner = runner_for(scheduler)
    a, b = spec("a", 5, max_tokens=12), spec("bb", 4, max_tokens=12)
    scheduler.add(a)
    scheduler.add(b)
    seen = drain(scheduler, runner)
    for s in (a, b):
        tokens = [t for update in seen[s.request_id] for t in update.token_ids]
        assert tokens == continuation(s.prompt_token_ids, 12, VOCAB)
    assert seen["a"][-1].num_preemptions == 0
    assert seen["bb"][-1].num_preemptions > 0
    assert scheduler.num_preemptions == seen["bb"][-1].num_preemptions
    assert scheduler.num_blocks_used == 0


def test_a_preempted_sequence_returns_before_later_arrivals() -> None:
    scheduler = Scheduler(config(num_blocks=5, max_sequences=2))
    runner = runner_for(scheduler)
    for name in ("a", "bb", "ccc"):
        scheduler.add(spec(name, 4, max_tokens=12))
    order = list[str]()
    while scheduler.request_ids:
        step(scheduler, runner)
        order += scheduler.changes.admitted
    assert order.count("bb") > 1
    assert order.index("ccc") > max(i for i, name in enumerate(order) if name == "bb")


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"),
    [
        (62, 2, True),
        (63, 1, True),
        (63, 2, False),
        (64, 1, False),
        (63, None, True),
        (64, None, False),
        (1, 10**9, False),
    ],
)
def test_context_length_is_exact(num_prompt: int, max_tokens: int | None, fits: bool) -> None:
    scheduler = Scheduler(config())
    request = spec("a", num_prompt, max_tokens=max_tokens)
    if not fits:
        with pytest.raises(ContextLengthError):
            scheduler.add(request)
        return
    scheduler.add(request)
    seen = drain(scheduler, runner_for(scheduler))
    assert sum(len(u.token_ids) for u in seen["a"]) == 64 - num_prompt
    assert seen["a"][-1].finish_reason == "length"


def test_a_request_that_fills_the_pool_to_the_last_place_finishes() -> None:
    scheduler = Scheduler(config(num_blocks=3))
    with pytest.raises(ContextLengthError, match="KV memory"):
        scheduler.add(spec("a", 6, max_tokens=8))
    scheduler.add(spec("a", 6, max_tokens=7))
    scheduler.add(spec("b", 6))
    seen = drain(scheduler, runner_for(scheduler))
    assert {name: sum(len(u.token_ids) for u in updates) for name, updates in seen.items()} == {"a": 7, "b": 7}


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (spec("a", 0), "prompt"),
        (SequenceSpec("a", (1, VOCAB), Sampling()), "prompt"),
        (SequenceSpec("a", (-1,), Sampling()), "prompt"),
        (spec("a", max_tokens=-1), "max_tokens"),
        (spec("a", stop_token_ids=(10**7,)), "stop_token_ids"),
        (spec("a", logit_bias=((VOCAB, 1.0),)), "logit_bias"),
    ],
)
def test_impossible_requests_are_refused_by_name(bad: SequenceSpec, param: str) -> None:
    scheduler = Scheduler(config())
    with pytest.raises(RequestError) as caught:
        scheduler.add(bad)
    assert caught.value.param == param
    assert not scheduler.request_ids


def test_a_full_queue_takes_no_more() -> None:
    scheduler = Scheduler(config(max_sequences=1, max_waiting=1))
    scheduler.add(spec("a"))
    scheduler.add(spec("b"))
    with pytest.raises(OverloadedError):
        scheduler.add(spec("c"))
    assert scheduler.request_ids == ("a", "b")


def test_an_id_in_use_is_refused() -> None:
    scheduler = Scheduler(config())
    scheduler.add(spec("a"))
    with pytest.raises(RequestError, match="already in use"):
        scheduler.add(spec("a"))


def test_stop_ids_end_tokens_and_their_exceptions() -> None:
    scheduler = Scheduler(config(eos_token_ids=(2, 3)))
    scheduler.add(spec("eos", max_tokens=4))
    scheduler.add(spec("stop", max_tokens=4, stop_token_ids=(9,)))
    scheduler.add(spec("deaf", 1, max_tokens=2, ignore_eos=True))
    scheduler.add(spec("early", 1, max_tokens=4, min_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.sampling.bias is not None
    assert plan.sampling.bias.offsets.tolist() == [0, 0, 0, 0, 2]
    assert sorted(plan.sampling.bias.ids.tolist()) == [2, 3]
    assert np.isneginf(plan.sampling.bias.values).all()
    updates = {u.request_id: u for u in scheduler.commit(plan, answer(plan, [[3], [9], [2], [4]]))}
    assert (updates["eos"].finish_reason, updates["eos"].stop_reason) == ("stop", None)
    assert (updates["stop"].finish_reason, updates["stop"].stop_reason) == ("stop", 9)
    assert updates["deaf"].finish_reason is None
    plan = scheduler.schedule()
    assert plan is not None and plan.sampling.bias is None
    updates = {u.request_id: u for u in scheduler.commit(plan, answer(plan, [[2], [2]]))}
    assert updates["deaf"].finish_reason == "length"
    assert updates["early"].finish_reason == "stop"


@pytest.mark.parametrize(
    ("sampled", "kept", "reason"),
    [([5, 9, 6, 7], [5, 9], "stop"), ([5, 6, 7, 9], [5, 6, 7, 9], "stop"), ([5, 6, 7, 8], [5, 6, 7, 8], "length")],
)
def test_several_tokens_in_a_step_stop_before_length_is_seen(sampled: list[int], kept: list[int], reason: str) -> None:
    scheduler = Scheduler(config())
    scheduler.add(spec("a", 3, max_tokens=5, stop_token_ids=(9,)))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, answer(plan, [[4]]))
    scheduler.propose("a", (5, 9, 7, 11, 12, 13))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_drafts.tolist() == [3], "as many as max_tokens leaves, less the one that comes anyway"
    (update,) = scheduler.commit(plan, answer(plan, [sampled]))
    assert (list(update.token_ids), update.finish_reason) == (kept, reason)
    scheduler.check()
    assert scheduler.num_blocks_used == 0


def test_drafts_leave_everybody_who_decodes_a_token() -> None:
    scheduler = Scheduler(config(max_step_tokens=8, num_blocks=64))
    for name in "abc":
        scheduler.add(spec(name, 2, max_tokens=30))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, answer(plan, [[1]] * 3))
    for name in "abc":
        scheduler.propose(name, (1,) * 7)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_drafts.tolist() == [5, 0, 0]
    assert plan.num_sequences == 3


def test_abort_in_flight_ignores_the_result_and_returns_the_blocks_afterwards() -> None:
    scheduler = Scheduler(config())
    scheduler.add(spec("a", max_tokens=8))
    scheduler.add(spec("b", max_tokens=8))
    plan = scheduler.schedule()
    assert plan is not None
    used = scheduler.num_blocks_used
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert scheduler.num_blocks_used == used, "the step still writes to them"
    scheduler.check()
    updates = scheduler.commit(plan, answer(plan, [[1], [2]]))
    assert [u.request_id for u in updates] == ["b"]
    assert scheduler.num_blocks_used == used // 2
    scheduler.add(spec("a", max_tokens=1))
    scheduler.check()


def test_penalties_carry_counts_through_preemption() -> None:
    scheduler = Scheduler(config())
    scheduler.add(SequenceSpec("a", (1, 1, 2), Sampling(max_tokens=9, frequency_penalty=0.5)))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, answer(plan, [[2]]))
    plan = scheduler.schedule()
    assert plan is not None and plan.sampling.penalties is not None and plan.sampling.frequency is not None
    rows = plan.sampling.penalties
    assert dict(zip(rows.ids.tolist(), rows.values.tolist(), strict=True)) == {1: 0.0, 2: 1.0}
    assert plan.sampling.frequency.tolist() == [0.5]


def test_horizon_ends_at_completion_blocks_and_admission() -> None:
    scheduler = Scheduler(config())
    runner = runner_for(scheduler)
    assert scheduler.horizon() == 0
    scheduler.add(spec("a", 4, max_tokens=9))
    assert scheduler.horizon() == 0
    step(scheduler, runner)
    assert scheduler.horizon() == 8
    scheduler.add(spec("b", 4, max_tokens=9))
    assert scheduler.horizon() == 0, "b would be admitted"
    tight = Scheduler(config(num_blocks=4, max_sequences=2))
    tight.add(spec("a", 4, max_tokens=9))
    tight.add(spec("b", 4, max_tokens=9))
    step(tight, runner_for(tight))
    assert tight.horizon() == 4, "then both want a third block and none is free"

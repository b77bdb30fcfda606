"""Who is let in when: the queue against a sorted list, and what it promises to those who wait."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferloop.core.request import BATCH_PRIORITY, Sampling
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.schedule.pace import MIN_PREFILL_TOKENS, StepLimits, StepTime, TimeLimit
from inferloop.engine.schedule.policy import BACKGROUND_EVERY, ScheduleConfig
from inferloop.engine.schedule.queue import WaitQueue
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import PRIORITY_LEVEL_MS, Sequence, SequenceSpec
from inferloop.engine.schedule.step import StepPlan

VOCAB = 13
PRIORITIES = st.one_of(st.integers(-1000, 1000), st.integers(BATCH_PRIORITY, BATCH_PRIORITY + 3), st.just(0))


def sequence(number: int, priority: int, arrived_ms: int) -> Sequence:
    spec = SequenceSpec(f"r{number}", (1,), Sampling(), priority=priority, arrived_ms=arrived_ms)
    return Sequence(spec, number, 1, frozenset())


class QueueMachine(RuleBasedStateMachine):
    """Beside a list that is searched anew each time for who has waited longest for their priority."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.truth, self.now_ms, self.number = WaitQueue(), list[Sequence](), 0, 0

    @rule(priority=PRIORITIES, later_ms=st.sampled_from([0, 1, 500, 5000]))
    def push(self, priority: int, later_ms: int) -> None:
        self.now_ms += later_ms
        self.number += 1
        new = sequence(self.number, priority, self.now_ms)
        self.queue.push(new)
        self.truth.append(new)

    @rule(data=st.data())
    @precondition(lambda self: self.truth)
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.truth))
        self.queue.remove(gone)
        self.truth.remove(gone)

    def waits_best(self) -> Sequence:
        """Effective priority improves by a level per second; background work is never ahead."""

        def key(s: Sequence) -> tuple[bool, float, int]:
            effective = s.spec.priority - (self.now_ms - s.spec.arrived_ms) / PRIORITY_LEVEL_MS
            return s.spec.priority >= BATCH_PRIORITY, effective, int(s.spec.request_id[1:])

        return min(self.truth, key=key)

    @rule(later_ms=st.integers(0, 10**6))
    @precondition(lambda self: self.truth)
    def pop(self, later_ms: int) -> None:
        self.now_ms += later_ms
        best = self.waits_best()
        assert self.queue.head is best
        assert self.queue.pop() is best
        self.truth.remove(best)

    @invariant()
    def sound(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.truth)
        assert set(self.queue) == set(self.truth)
        assert (self.queue.head is None) == (not self.truth)


TestQueueMachine = QueueMachine.TestCase


def scheduler_of(**changes: Any) -> tuple[Scheduler, EchoRunner]:
    options: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 12,
        "max_step_tokens": 8,
        "max_sequences": 2,
        "max_waiting": 500,
    }
    config = ScheduleConfig(vocab_size=VOCAB, context_length=48, **(options | changes))
    runner = EchoRunner(vocab_size=VOCAB, context_length=48, block_size=config.block_size, num_blocks=config.num_blocks)
    return Scheduler(config), runner


def step(
    scheduler: Scheduler, runner: EchoRunner, limits: StepLimits | None = None
) -> tuple[StepPlan, list[str], list[str]]:
    """(plan, ids that got tokens, ids that ended)."""
    plan = scheduler.schedule(limits or StepLimits())
    assert plan is not None
    runner.submit(plan)
    updates = scheduler.commit(plan, runner.wait())
    scheduler.check()
    return plan, [u.request_id for u in updates], [u.request_id for u in updates if u.finish_reason]


@given(
    behind=st.integers(1, 6),
    step_ms=st.sampled_from([100, 250, 1000]),
    num_prompt=st.integers(1, 20),
    num_output=st.integers(1, 6),
)
def test_nobody_waits_forever(behind: int, step_ms: int, num_prompt: int, num_output: int) -> None:
    """Better ones keep coming, as many as can ever be served; who is `behind` levels worse still is let in once those
    that came within that many seconds are through, and not before."""
    scheduler, runner = scheduler_of(max_sequences=1)
    sampling = Sampling(max_tokens=num_output)
    scheduler.add(SequenceSpec("worse", (1,) * num_prompt, sampling, priority=behind))
    order, now_ms, number = list[str](), 0, 0
    while "worse" not in order:
        assert number < 1000
        if len(scheduler.request_ids) < 4:
            scheduler.add(SequenceSpec(f"{now_ms}-{number}", (2,) * num_prompt, sampling, arrived_ms=now_ms))
            number += 1
        step(scheduler, runner)
        order += scheduler.changes.admitted
        now_ms += step_ms
    overtook = [int(name.partition("-")[0]) for name in order if name != "worse"]
    assert all(arrived_ms < behind * PRIORITY_LEVEL_MS for arrived_ms in overtook)
    assert overtook == sorted(overtook), "equal priorities are first come, first served"


@given(
    num_blocks=st.integers(12, 30),
    jobs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=5),
    calls=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 20), st.integers(1, 12)), max_size=12),
)
def test_background_work_yields(
    num_blocks: int, jobs: list[tuple[int, int]], calls: list[tuple[int, int, int]]
) -> None:
    """The foreground's steps are those it has without background work, but for turns that are small and rare."""

    def run(with_jobs: bool) -> list[list[tuple[str, int]]]:
        scheduler, runner = scheduler_of(
            num_blocks=num_blocks, max_sequences=3, max_step_tokens=40, share_prefixes=False
        )
        if with_jobs:
            for i, (num_prompt, num_output) in enumerate(jobs):
                prompt = tuple((i + k) % 5 for k in range(num_prompt))
                scheduler.add(SequenceSpec(f"b{i}", prompt, Sampling(max_tokens=num_output), priority=BATCH_PRIORITY))
            step(scheduler, runner)
        steps, pending, names = [], list(calls), dict[int, str]()
        since_turn = 0
        while pending or scheduler.has_foreground:
            while pending and (pending[0][0] == 0 or not scheduler.has_foreground):
                _, num_prompt, num_output = pending.pop(0)
                name = f"f{len(pending)}"
                prompt = tuple(5 + (len(pending) + k) % 7 for k in range(num_prompt))
                scheduler.add(SequenceSpec(name, prompt, Sampling(max_tokens=num_output)))
            if pending:
                pending[0] = (pending[0][0] - 1, *pending[0][1:])
            plan = scheduler.schedule()
            assert plan is not None
            sizes = [int(n) for n in plan.offsets[1:] - plan.offsets[:-1]]
            names |= {s.slot: s.spec.request_id for s in scheduler._running}
            planned = [(names[int(slot)], size) for slot, size in zip(plan.slots, sizes, strict=True)]
            runner.submit(plan)
            scheduler.commit(plan, runner.wait())
            scheduler.check()
            background = [size for name, size in planned if name.startswith("b")]
            assert len(background) <= 1 and sum(background) <= MIN_PREFILL_TOKENS
            if background:
                assert since_turn == 0 or since_turn >= BACKGROUND_EVERY - 1, "turns too near to each other"
                since_turn = 0
            since_turn += 1
            steps.append([entry for entry in planned if entry[0].startswith("f")])
        if with_jobs:
            while scheduler.request_ids:
                step(scheduler, runner)
        assert scheduler.num_blocks_used == 0
        return steps

    assert run(with_jobs=True) == run(with_jobs=False)


def test_background_work_gets_its_turns_and_then_everything() -> None:
    scheduler, runner = scheduler_of(num_blocks=24, max_step_tokens=20)
    scheduler.add(SequenceSpec("job", (1, 2, 3), Sampling(max_tokens=30), priority=BATCH_PRIORITY))
    step(scheduler, runner)
    scheduler.add(SequenceSpec("call", (4, 5), Sampling(max_tokens=41)))
    gained = [names for _, names, _ in (step(scheduler, runner) for _ in range(41))]
    assert [i + 1 for i, names in enumerate(gained) if "job" in names] == [BACKGROUND_EVERY, 2 * BACKGROUND_EVERY]
    assert scheduler.request_ids == ("job",)
    assert step(scheduler, runner)[1] == ["job"]


def test_background_work_is_let_in_on_its_turn_too() -> None:
    scheduler, runner = scheduler_of(num_blocks=24, max_step_tokens=40)
    scheduler.add(SequenceSpec("call", (4, 5), Sampling(max_tokens=40)))
    scheduler.add(SequenceSpec("job", (1,) * 20, Sampling(max_tokens=2), priority=BATCH_PRIORITY))
    sizes = [step(scheduler, runner)[0].num_tokens for _ in range(40)]
    assert sizes[BACKGROUND_EVERY - 1] == 1 + MIN_PREFILL_TOKENS
    assert sizes[2 * BACKGROUND_EVERY - 1] == 1 + 20 - MIN_PREFILL_TOKENS
    assert sum(sizes) == 2 + 39 + 20


def test_background_work_gives_way_for_slots_and_blocks_at_once() -> None:
    for max_sequences, num_blocks in ((2, 24), (8, 8)):
        scheduler, runner = scheduler_of(num_blocks=num_blocks, max_sequences=max_sequences, max_step_tokens=40)
        for name in ("job0", "job1"):
            scheduler.add(SequenceSpec(name, (int(name[-1]),) * 12, Sampling(max_tokens=10), priority=BATCH_PRIORITY))
        step(scheduler, runner)
        scheduler.add(SequenceSpec("call", (4,) * 16, Sampling(max_tokens=3)))
        _, gained, _ = step(scheduler, runner)
        assert gained == ["call"]
        assert scheduler.changes.preempted[0] == "job1", "the last in order goes first"


def test_a_time_limit_bounds_what_is_prefilled_beside_decodes_only() -> None:
    limit = TimeLimit(30.0, StepTime(fixed_ms=5.0, per_decode_ms=1.0, per_prefill_ms=0.5))
    scheduler, runner = scheduler_of(num_blocks=99, max_sequences=8, max_step_tokens=64, block_size=1)
    limits = StepLimits(foreground=limit)
    scheduler.add(SequenceSpec("first", (4,) * 47, Sampling(max_tokens=1)))
    assert step(scheduler, runner, limits)[0].num_tokens == 47, "nobody decodes yet"
    for name in ("a", "b"):
        scheduler.add(SequenceSpec(name, (len(name),), Sampling(max_tokens=20)))
    step(scheduler, runner, limits)
    scheduler.add(SequenceSpec("long", (7,) * 47, Sampling(max_tokens=1)))
    plan, _, _ = step(scheduler, runner, limits)
    assert plan.num_tokens == 2 + 46
    assert limit.time.predict(46, 2) == limit.ms
    step(scheduler, runner, limits)
    tight = StepLimits(foreground=TimeLimit(1.0, limit.time))
    scheduler.add(SequenceSpec("longer", (8,) * 40, Sampling(max_tokens=1)))
    assert step(scheduler, runner, tight)[0].num_tokens == 2 + MIN_PREFILL_TOKENS, "it still gets on"


def test_a_background_step_is_kept_short_on_demand() -> None:
    limits = StepLimits(background=TimeLimit(9.0, StepTime(fixed_ms=5.0, per_decode_ms=2.0, per_prefill_ms=0.1)))
    scheduler, runner = scheduler_of(num_blocks=99, max_sequences=8, max_step_tokens=64)
    for i in range(4):
        scheduler.add(SequenceSpec(f"job{i}", (i,) * 30, Sampling(max_tokens=15), priority=BATCH_PRIORITY))
    assert [step(scheduler, runner, limits)[0].num_tokens for _ in range(3)] == [40, 1 + 20, 2], "rows go first"
    while not all(s.decoding for s in scheduler._running) or len(scheduler._running) < 4:
        step(scheduler, runner)
    assert step(scheduler, runner, limits)[0].num_tokens == 2
    assert step(scheduler, runner)[0].num_tokens == 4
    while scheduler.request_ids:
        step(scheduler, runner, limits)

"""Random workloads: nothing leaks, everybody finishes, and outputs do not depend on budget, pool or interruptions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferloop.core.errors import ContextLengthError, OverloadedError
from inferloop.core.request import BATCH_PRIORITY, Sampling
from inferloop.engine.compute.echo import EchoRunner, continuation, hidden_state, prompt_logprob
from inferloop.engine.compute.runner import GiveUp
from inferloop.engine.schedule.blocks import BlockPool
from inferloop.engine.schedule.pace import StepLimits, StepTime, TimeLimit
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec, SequenceUpdate
from inferloop.engine.schedule.step import StepPlan

VOCAB = 13
LIMITS = st.builds(
    lambda foreground, background: StepLimits(
        *(None if ms is None else TimeLimit(float(ms), StepTime(1.0, 1.0, 0.05)) for ms in (foreground, background))
    ),
    st.sampled_from([None, None, 0, 3]),
    st.sampled_from([None, None, 0, 3]),
)
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


class Machine(RuleBasedStateMachine):
    """Arrivals, aborts (also while a step is in flight), drafts and steps in any order."""

    @initialize(
        block_size=st.integers(1, 5),
        num_blocks=st.integers(4, 14),
        budget=st.integers(1, 12),
        max_sequences=st.integers(1, 4),
        num_groups=st.integers(1, 2),
    )
    def start(self, block_size: int, num_blocks: int, budget: int, max_sequences: int, num_groups: int) -> None:
        self.config = ScheduleConfig(
            vocab_size=VOCAB,
            context_length=24,
            block_size=block_size,
            num_blocks=num_blocks,
            num_kv_groups=num_groups,
            max_step_tokens=budget,
            max_sequences=max_sequences,
            max_waiting=3,
        )
        self.scheduler = Scheduler(self.config)
        self.runner = EchoRunner(
            vocab_size=VOCAB,
            context_length=24,
            block_size=block_size,
            num_blocks=num_blocks,
            num_kv_groups=num_groups,
        )
        self.plan: StepPlan | None = None
        self.specs: dict[str, SequenceSpec] = {}
        self.outputs: dict[str, list[int]] = {}
        self.untold: set[str] = set()
        self.first_admitted: list[str] = []
        self.num_added = 0

    @rule(
        num_prompt=st.integers(1, 12),
        kind=st.integers(0, 2),
        num_out=st.integers(0, 8),
        num_scores=st.sampled_from([None, None, 0, 2]),
        priority=st.sampled_from([0, 0, 0, 1, BATCH_PRIORITY]),
    )
    def add(self, num_prompt: int, kind: int, num_out: int, num_scores: int | None, priority: int) -> None:
        name = f"r{self.num_added}"
        prompt = tuple(
            (kind * 5 + i * i) % VOCAB for i in range(num_prompt)
        )  # three kinds, so that they share beginnings
        sampling = Sampling(max_tokens=num_out, num_prompt_logprobs=num_scores)
        pool = not num_out and num_scores is None
        spec = SequenceSpec(name, prompt, sampling, priority=priority, pool=pool)
        try:
            self.scheduler.add(spec)
        except ContextLengthError:
            limit = self.config.max_total_tokens if num_out else self.config.max_prompt_tokens
            assert num_prompt + num_out > limit
            return
        except OverloadedError:
            limit = self.config.max_sequences + self.config.max_waiting
            ahead = [s for s in self.specs.values() if priority == BATCH_PRIORITY or s.priority < BATCH_PRIORITY]
            assert len(ahead) >= limit
            return
        self.num_added += 1
        self.specs[name] = spec
        self.outputs[name] = []
        self.untold.add(name)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.specs:
            name = data.draw(st.sampled_from(sorted(self.specs)))
            assert self.scheduler.abort(name)
            del self.specs[name]

    @rule(data=st.data(), num_right=st.integers(0, 3))
    @precondition(lambda self: self.plan is None)
    def propose(self, data: st.DataObject, num_right: int) -> None:
        if self.specs:
            name = data.draw(st.sampled_from(sorted(self.specs)))
            spec, done = self.specs[name], self.outputs[name]
            right = continuation([*spec.prompt_token_ids, *done], num_right, VOCAB)
            self.scheduler.propose(name, (*right, data.draw(st.integers(0, VOCAB - 1))))

    @rule(limits=LIMITS, is_given_up=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: self.plan is None)
    def schedule(self, limits: StepLimits, is_given_up: bool = False) -> None:
        self.plan = self.scheduler.schedule(limits)
        if self.plan is None:
            assert not self.specs
            return
        assert 0 < self.plan.num_tokens <= self.config.max_step_tokens
        self.first_admitted += [n for n in self.scheduler.changes.admitted if n not in self.first_admitted]
        give_up = GiveUp()
        if is_given_up:
            give_up.set()
        self.runner.submit(self.plan, give_up)

    @rule()
    @precondition(lambda self: self.plan is not None)
    def commit(self) -> None:
        assert self.plan is not None
        for update in self.scheduler.commit(self.plan, self.runner.wait()):
            self.outputs[update.request_id] += update.token_ids
            self.check_prompt(update)
            if update.finish_reason is not None:
                self.finish(update.request_id)
        self.plan = None

    def check_prompt(self, update: SequenceUpdate) -> None:
        """What is told about a prompt is complete, right, and told once."""
        spec, is_first = self.specs[update.request_id], update.request_id in self.untold
        self.untold.discard(update.request_id)
        prompt, num_top = spec.prompt_token_ids, spec.sampling.num_prompt_logprobs
        if is_first and num_top is not None:
            assert update.num_cached_tokens == 0
            assert update.prompt_logprobs == tuple(
                prompt_logprob(prompt[:i], prompt[i], num_top, VOCAB) for i in range(1, len(prompt))
            )
        else:
            assert update.prompt_logprobs is None
        if spec.pool:
            assert update.finish_reason == "stop" and update.pooled is not None
            expected = sum(hidden_state(prompt[: i + 1]) for i in range(len(prompt)))
            assert (update.pooled == expected).all()
        else:
            assert update.pooled is None

    def finish(self, name: str) -> None:
        spec = self.specs.pop(name)
        assert self.outputs[name] == continuation(spec.prompt_token_ids, spec.sampling.max_tokens or 0, VOCAB)

    @invariant()
    def sound(self) -> None:
        self.scheduler.check()
        assert set(self.scheduler.request_ids) == set(self.specs)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if self.plan is None:
                self.schedule(limits=StepLimits())
            if self.plan is None:
                break
            self.commit()
            self.scheduler.check()
        assert not self.specs, "a request never finished"
        assert self.scheduler.num_blocks_used == 0
        super().teardown()


Machine.TestCase.settings = settings(QUIET, stateful_step_count=40)
TestMachine = Machine.TestCase


def workload(seed: int, num: int) -> list[SequenceSpec]:
    rng = random.Random(seed)
    return [
        SequenceSpec(
            f"r{i}",
            tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))),
            Sampling(max_tokens=rng.randint(1, 12)),
        )
        for i in range(num)
    ]


def run_all(config: ScheduleConfig, specs: list[SequenceSpec], arrive: Callable[[int], int]) -> dict[str, list[int]]:
    """`arrive(step)` says how many more requests come before a step. Also checks first come, first served."""
    scheduler = Scheduler(config)
    runner = EchoRunner(
        vocab_size=VOCAB,
        context_length=config.context_length,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
    )
    outputs: dict[str, list[int]] = {s.request_id: [] for s in specs}
    pending, admitted = list(specs), list[str]()
    for step in range(100_000):
        for _ in range(min(len(pending), arrive(step))):
            scheduler.add(pending.pop(0))
        plan = scheduler.schedule()
        if plan is None and not pending:
            break
        if plan is not None:
            admitted += [name for name in scheduler.changes.admitted if name not in admitted]
            runner.submit(plan)
            for update in scheduler.commit(plan, runner.wait()):
                outputs[update.request_id] += update.token_ids
        scheduler.check()
    assert admitted == [s.request_id for s in specs], "somebody was overtaken"
    return outputs


@pytest.mark.parametrize("seed", range(4))
def test_outputs_do_not_depend_on_budget_pool_or_chunks(seed: int) -> None:
    specs = workload(seed, 24)
    truth = {s.request_id: continuation(s.prompt_token_ids, s.sampling.max_tokens or 0, VOCAB) for s in specs}
    for budget, num_blocks, block_size, max_sequences in (
        (1, 16, 2, 8),
        (7, 11, 3, 5),
        (64, 8, 4, 8),
        (256, 99, 16, 8),
    ):
        config = ScheduleConfig(
            vocab_size=VOCAB,
            context_length=32,
            block_size=block_size,
            num_blocks=num_blocks,
            max_step_tokens=budget,
            max_sequences=max_sequences,
            max_waiting=100,
        )
        rng = random.Random(seed)
        assert run_all(config, specs, lambda _step, rng=rng: rng.randint(0, 2)) == truth  # type: ignore[misc]


@given(
    seed=st.integers(0, 10**6),
    num=st.integers(1, 5),
    num_jobs=st.integers(0, 3),
    num_blocks=st.integers(14, 24),
    max_sequences=st.integers(1, 4),
    limits=LIMITS,
)
@QUIET
def test_horizon_equals_single_steps(
    seed: int, num: int, num_jobs: int, num_blocks: int, max_sequences: int, limits: StepLimits
) -> None:
    config = ScheduleConfig(
        vocab_size=VOCAB,
        context_length=64,
        block_size=4,
        num_blocks=num_blocks,
        max_step_tokens=3,
        max_sequences=max_sequences,
    )
    scheduler = Scheduler(config)
    runner = EchoRunner(vocab_size=VOCAB, context_length=64, block_size=4, num_blocks=num_blocks)
    specs = workload(seed, num + num_jobs)
    for spec in specs[num:]:
        scheduler.add(replace(spec, priority=BATCH_PRIORITY))

    def advance() -> tuple[list[int], bool, bool]:
        """(slots, is it plain decode without admission or preemption, did anybody finish)."""
        preempted_before = scheduler.num_preemptions
        plan = scheduler.schedule(limits)
        if plan is None:
            return [], False, False
        runner.submit(plan)
        updates = scheduler.commit(plan, runner.wait())
        plain = plan.num_tokens == plan.num_sequences and not scheduler.changes.admitted
        plain = plain and scheduler.num_preemptions == preempted_before
        plain = plain and bool((plan.sample_rows >= 0).all())
        return plan.slots.tolist(), plain, any(u.finish_reason for u in updates)

    for _ in range(seed % 9 if num_jobs else 0):
        advance()
    for spec in specs[:num]:
        scheduler.add(replace(spec, sampling=Sampling(max_tokens=1 + 3 * (spec.sampling.max_tokens or 0))))
    while scheduler.request_ids:
        num_ahead = scheduler.horizon(limits)
        if not num_ahead:
            advance()
            continue
        steps = [advance() for _ in range(num_ahead)]
        assert all(plain for _, plain, _ in steps)
        assert all(slots == steps[0][0] for slots, _, _ in steps)
        assert not any(finished for _, _, finished in steps[:-1])
        may_be_turn = scheduler.has_foreground and any(s.background for s in scheduler._sequences.values())
        if not steps[-1][2] and scheduler.request_ids:
            steps_before_turn = scheduler._turns.num_before
            slots, plain, _ = advance()
            was_turn = may_be_turn and steps_before_turn == 0
            assert was_turn or not plain or slots != steps[0][0], "the horizon was shorter than it could be"


def test_shared_blocks_are_freed_by_their_last_holder() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 2
    pool.release(blocks[:1])
    assert pool.num_free == 3
    assert sorted(pool.allocate(3)) == sorted({0, 1, 2, 3} - {blocks[1]})

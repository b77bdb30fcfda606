"""One scheduler, one token budget per step.

There are no phases. A step first lets every decoding sequence compute its newest token, then spends what is left of
the budget on sequences that are further behind (a chunk of a prompt, or a resume), then admits from the queue. When
blocks run out the last in order gives way: it returns to the queue with its tokens, ahead of later arrivals, and
computes them again. A sequence takes the blocks of all its known tokens when it is admitted, so only decoding can run
out of them, and the first in order can always go on: every step makes progress.

Background sequences stand behind all others. While anybody else runs or waits they pause, keeping their blocks until
those or their slots are wanted; only every so often one of them gets a little further (schedule/turns).
"""

from __future__ import annotations

import bisect
import heapq

from inferloop.core.errors import OverloadedError, RequestError
from inferloop.engine.schedule.blocks import BlockTables
from inferloop.engine.schedule.build import Chunk, PlanBuilder
from inferloop.engine.schedule.outline import Outline, StepChanges
from inferloop.engine.schedule.pace import StepLimits
from inferloop.engine.schedule.pacer import Waiting
from inferloop.engine.schedule.policy import (
    ScheduleConfig,
    choose_victim,
    has_room,
    may_admit,
    num_drafts_allowed,
    resolve_max_tokens,
)
from inferloop.engine.schedule.prefix import PrefixCache
from inferloop.engine.schedule.queue import WaitQueue
from inferloop.engine.schedule.radix import Match
from inferloop.engine.schedule.sequence import NO_SLOT, Sequence, SequenceSpec, SequenceUpdate
from inferloop.engine.schedule.step import StepPlan, StepResult
from inferloop.engine.schedule.tier import BlockTier
from inferloop.engine.schedule.turns import BackgroundTurns
from inferloop.engine.stats import TierStats

NO_LIMITS = StepLimits()


class Scheduler:
    """Owns every sequence and every block. One thread; at most one plan in flight."""

    def __init__(self, config: ScheduleConfig, tier: BlockTier | None = None) -> None:
        self.config = config
        self.changes = StepChanges()
        """What the last `schedule` moved."""
        self.num_preemptions = 0
        self._eos = frozenset(config.eos_token_ids)
        self._tables = BlockTables(
            num_groups=config.num_kv_groups,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_slots=config.max_sequences,
            max_tokens=config.max_total_tokens,
            share_prefixes=config.share_prefixes,
        )
        self._prefix = PrefixCache(config, self._tables, tier)
        self._builder = PlanBuilder(self._tables, config.vocab_size, config.max_sequences)
        self._sequences: dict[str, Sequence] = {}
        self._waiting = WaitQueue()
        self._running: list[Sequence] = []
        self._free_slots = list(range(config.max_sequences))
        self._num_arrived = 0
        self._num_background = 0
        self._turns = BackgroundTurns(self._make_room, self._let_in)
        self._num_steps = 0
        self._in_flight: StepPlan | None = None
        self._chunks: list[Chunk] = []
        """What the plan in flight computes."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_blocks_used(self) -> int:
        return self._tables.num_used

    @property
    def num_blocks_total(self) -> int:
        return self._tables.num_total

    @property
    def num_prefix_queries(self) -> int:
        return self._prefix.num_queries

    @property
    def num_prefix_hits(self) -> int:
        return self._prefix.num_hits

    @property
    def tier_stats(self) -> TierStats | None:
        return self._prefix.tier_stats

    @property
    def is_empty(self) -> bool:
        """Whether nobody runs or waits."""
        return not self._sequences

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._sequences)

    def waiting(self) -> list[Waiting]:
        """Who waits in the foreground and never ran, in order. Nobody when nobody of the foreground runs: then the next
        step lets them in, and what they take is measured anew."""
        if not self._class_running(in_background=False):
            return []
        unborn = [s for s in self._waiting.in_order() if not s.background and not s.num_preemptions]
        return [Waiting(s.spec.request_id, s.spec.arrived_ms, s.num_known, s.spec.sheddable) for s in unborn]

    def num_uncached(self, request_id: str) -> int:
        """How many tokens of one that waits would have to be computed if it were let in now."""
        return self._prefix.num_uncached(self._sequences[request_id])

    def add(self, spec: SequenceSpec) -> None:
        """Queue a sequence.

        Raises RequestError or ContextLengthError for what can never be served, OverloadedError when as many are
        already here as may run and wait (of its class, or altogether for background work).
        """
        max_tokens = resolve_max_tokens(self.config, spec)
        if spec.request_id in self._sequences:
            raise RequestError(f"request id {spec.request_id!r} is already in use", param="request_id")
        sequence = Sequence(spec, self._num_arrived, max_tokens, self._eos)
        if not has_room(self.config, len(self._sequences), self._num_background, sequence.background):
            raise OverloadedError("the queue is full", reason="queue_full")
        self._num_arrived += 1
        self._num_background += sequence.background
        self._sequences[spec.request_id] = sequence
        self._waiting.push(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop a sequence, wherever it is. Blocks that a step in flight still writes are returned by its commit.

        False: no such sequence (it has ended, or never was).
        """
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._num_background -= sequence.background
        if sequence.slot == NO_SLOT:
            self._waiting.remove(sequence)
            return True
        self._running.remove(sequence)
        if any(sequence is computed for computed, _ in self._chunks):
            sequence.aborted = True
        else:
            self._vacate(sequence)
        return True

    def propose(self, request_id: str, drafts: tuple[int, ...]) -> None:
        """Guess what follows a decoding sequence; its next step verifies as many as fit. Ignored for any other."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.slot != NO_SLOT and sequence.decoding and sequence.generates:
            sequence.drafts = drafts

    def schedule(self, limits: StepLimits = NO_LIMITS) -> StepPlan | None:
        """The next step, or None when there is nothing to do. Allocates blocks, admits and preempts."""
        assert self._in_flight is None, "commit the plan in flight first"
        step = Outline(self.config.max_step_tokens)
        in_background = not self.has_foreground
        self._plan_running(step, in_background, limits)
        if all(self._sequences[name].background != in_background for name in step.preempted):
            self._plan_admissions(step, in_background)
        if in_background or not self._num_background:
            self._turns.reset()
        else:
            self._turns.plan(step, next(iter(self._class_running(in_background=True)), None), self._waiting.head)
        self.changes = step.changes
        if not step.chunks:
            assert not self._sequences, "sequences are left but none can go on"
            return None
        step.chunks.sort(key=_adapter_slot)  # who goes through one adapter lies side by side: one product
        self._num_steps += 1
        plan = self._prefix.add_transfers(self._builder.build(self._num_steps, step.chunks), step.chunks)
        self._in_flight, self._chunks = plan, step.chunks
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Take in what a step produced; returns one update for each sequence that gained tokens, or ended.

        Drafts that were not accepted are rolled back by not counting their positions as computed; so is a whole step
        that was given up.
        """
        flight, self._in_flight = self._in_flight, None
        chunks, self._chunks = self._chunks, []
        assert flight is not None and flight.step_id == plan.step_id == result.step_id, "not the plan in flight"
        if plan.sampling.mask is not None:
            plan.sampling.mask.result()  # also where the runner had no use for it: masks move on below
        if result.given_up:
            self._give_up([sequence for sequence, _ in chunks])
            return []
        self._prefix.commit(result.saved)
        updates = []
        token_ids, offsets = result.token_ids.tolist(), result.offsets.tolist()
        for i, (sequence, num_planned) in enumerate(chunks):
            if sequence.aborted:
                self._vacate(sequence)
                continue
            if plan.prompt_rows is not None:
                sequence.add_scores(result.prompt_logprobs[plan.prompt_rows.of(i)])
            if sequence.spec.pool:
                sequence.add_pooled(result.pooled_of(plan, i))
            sampled = token_ids[offsets[i] : offsets[i + 1]]
            sequence.num_computed += num_planned + max(0, len(sampled) - 1)
            sequence.drafts = ()
            self._prefix.publish(sequence)
            if not sampled and (sequence.generates or sequence.num_computed < sequence.num_known):
                continue
            update = sequence.advance(sampled, result.logprobs[i] if result.logprobs else ())
            updates.append(update)
            if update.finish_reason is not None:
                del self._sequences[sequence.spec.request_id]
                self._num_background -= sequence.background
                self._running.remove(sequence)
                self._vacate(sequence)
        return updates

    def close(self) -> None:
        """Nothing is scheduled any more: let go of threads."""
        self._builder.close()

    def horizon(self, limits: StepLimits = NO_LIMITS) -> int:
        """How many coming steps, this state onward, plan the same sequences with one token each.

        Holds without arrivals, aborts, drafts, other limits and tokens that end a sequence early: up to and including
        the step whose commit completes a sequence by length. 0 when the next step admits, prefills, preempts, has no
        blocks left or is a turn of background work.
        """
        assert self._in_flight is None, "commit the plan in flight first"
        in_background = not self.has_foreground
        stepping = self._class_running(in_background)
        if not stepping or any(not s.decoding or s.drafts for s in stepping):
            return 0
        stepping = stepping[: min(self.config.max_step_tokens, limits.num_decodes(in_background))]
        spare = min(self.config.max_step_tokens - len(stepping), limits.num_prefill(in_background, len(stepping)))
        head = self._head(in_background)
        if head is not None and spare:
            evicts = not in_background and self._running[-1].background
            if evicts or self._admissible(head) is not None:
                return 0

        def num_missing(num_steps: int) -> int:
            return sum(self._tables.num_missing(s.slot, s.num_known + num_steps - 1) for s in stepping)

        steps = range(1, min(s.num_remaining for s in stepping) + 1)
        num = bisect.bisect_right(steps, self._tables.num_free, key=num_missing)
        pauses = self._num_background and not in_background
        return min(num, self._turns.num_before) if pauses else num

    def check(self) -> None:
        """Assert every invariant: blocks, slots and queues add up. For tests and debugging."""
        leaving = [s for s, _ in self._chunks if s.aborted]
        holders = self._running + leaving
        slots = [s.slot for s in holders]
        assert len(set(slots)) == len(slots) and NO_SLOT not in slots, "a slot is used twice"
        assert sorted([*slots, *self._free_slots]) == list(range(self.config.max_sequences)), "a slot is leaked"
        waiting = list(self._waiting)
        self._waiting.check()
        assert all(s.slot == NO_SLOT and s.num_computed == 0 for s in waiting), "a waiting sequence holds memory"
        assert self._running == sorted(self._running, key=lambda s: s.order), "running is out of order"
        present = {s.spec.request_id for s in [*self._running, *waiting]}
        assert present == set(self._sequences) and len(present) == len(self._running) + len(waiting), "lost a sequence"
        assert self._num_background == sum(s.background for s in self._sequences.values()), "classes miscounted"
        for s in self._running:
            assert 0 <= s.num_computed < s.num_known, "computed more than is known"
            assert s.num_output < s.max_tokens or not s.generates, "generated more than was asked for"
        self._tables.check({s.slot: s.num_computed for s in holders})

    @property
    def has_foreground(self) -> bool:
        """Whether anybody runs or waits who is not background work."""
        return len(self._sequences) > self._num_background

    def _class_running(self, in_background: bool) -> list[Sequence]:
        """Who computes in the next step, turns of background work aside."""
        return [s for s in self._running if s.background == in_background]

    def _head(self, in_background: bool) -> Sequence | None:
        head = self._waiting.head
        return head if head is not None and head.background == in_background else None

    def _plan_running(self, step: Outline, in_background: bool, limits: StepLimits) -> None:
        """Decoding sequences first, then those further behind; each in order."""
        decoding, behind = list[Sequence](), list[Sequence]()
        for sequence in self._class_running(in_background):
            (decoding if sequence.decoding else behind).append(sequence)
        decoding = decoding[: limits.num_decodes(in_background)]
        num_left = len(decoding)
        for sequence in decoding:
            num_left -= 1
            if step.budget == 0:
                break
            if sequence.slot == NO_SLOT:
                continue  # gave way earlier in this loop
            if sequence.drafts:
                sequence.drafts = sequence.drafts[: num_drafts_allowed(sequence, step.budget - 1 - num_left)]
            if self._make_room(sequence, step):
                step.decode(sequence)
        step.prefill = limits.num_prefill(in_background, len(step.chunks))
        for sequence in behind:
            if sequence.slot != NO_SLOT:
                step.extend(sequence)

    def _make_room(self, sequence: Sequence, step: Outline) -> bool:
        """Blocks for everything known and drafted, taken from those behind when none is free."""
        while not self._tables.fits(sequence.slot, sequence.num_known + len(sequence.drafts)):
            num = self._tables.num_missing(sequence.slot, sequence.num_known + len(sequence.drafts))
            if num <= self._tables.num_free:
                self._tables.grow(sequence.slot, num)
                return True
            if sequence.drafts:
                sequence.drafts = ()  # a guess is worth nobody's work
                continue
            victim = choose_victim(self._running, sequence, step.slots)
            if victim is None:
                return False
            self._preempt(victim, step)
        return True

    def _preempt(self, victim: Sequence, step: Outline) -> None:
        self._running.remove(victim)
        self._vacate(victim)
        victim.reset_computed()
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push(victim)
        step.preempted.append(victim.spec.request_id)

    def _plan_admissions(self, step: Outline, in_background: bool) -> None:
        """In order, and nobody overtakes a head that does not fit: that is what keeps long prompts from starving.
        Background work makes room for it, though."""
        while step.budget and step.prefill and (head := self._head(in_background)) is not None:
            match = self._admissible(head)
            while match is None and self._running and self._running[-1].background and not in_background:
                self._preempt(self._running[-1], step)
                match = self._admissible(head)
            if not self._enter(head, match, step):
                return

    def _let_in(self, head: Sequence, step: Outline) -> bool:
        """Admit the head of the queue if it may enter now."""
        return self._enter(head, self._admissible(head), step)

    def _enter(self, head: Sequence, match: Match | None, step: Outline) -> bool:
        """Admit the head of the queue if there is a beginning to start from, and all of it has come."""
        match = match and self._prefix.complete(match, head, wait=not step.chunks)
        if match is None:
            return False
        self._admit(self._waiting.pop(), match, step)
        return True

    def _admissible(self, sequence: Sequence) -> Match | None:
        """The known beginning to start from when the sequence may enter now, else None."""
        if not self._free_slots:
            return None
        match = self._prefix.find(sequence)
        num_missing = self._tables.blocks_for(sequence.num_known) - len(match.nodes)
        num_free = self._tables.num_free - match.num_idle  # what it starts from can no longer make room
        num_growing = sum(s.background <= sequence.background for s in self._running)
        return match if may_admit(num_missing, num_free, num_growing) else None

    def _admit(self, sequence: Sequence, match: Match, step: Outline) -> None:
        sequence.slot = heapq.heappop(self._free_slots)
        self._prefix.start(sequence, match)
        bisect.insort(self._running, sequence, key=lambda s: s.order)
        step.admitted.append(sequence.spec.request_id)
        step.extend(sequence)

    def _give_up(self, sequences: list[Sequence]) -> None:
        self._prefix.give_up(sequences)
        for sequence in sequences:
            if sequence.aborted:
                self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self._prefix.publish(sequence)
        self._tables.clear(sequence.slot)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = NO_SLOT


def _adapter_slot(chunk: Chunk) -> int:
    return chunk[0].spec.adapter_slot

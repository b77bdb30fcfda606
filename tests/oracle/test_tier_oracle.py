"""The two tiers of the prefix cache against a plain set of prefixes, under random requests, aborts and restarts.

The echo runner's memory holds the tokens themselves, so every block that is loaded can be checked against the tokens
that it should stand for, and every answer is a hash of all that lies in its sequence's blocks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import pytest

from inferloop.core.clock import RealClock
from inferloop.core.request import BATCH_PRIORITY, Sampling
from inferloop.engine.blockstore.store import BlockStore, StoreConfig
from inferloop.engine.compute.echo import EchoRunner, continuation, hidden_state, prompt_logprob
from inferloop.engine.compute.runner import GiveUp
from inferloop.engine.schedule.keys import root_key
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec, SequenceUpdate
from inferloop.engine.schedule.step import BlockData, StepPlan, TokenLogprob
from inferloop.engine.schedule.tier import BlockTier
from inferloop.engine.stats import TierStats

SIZE, VOCAB, NUM_BLOCKS = 4, 97, 13
Prefix = tuple[tuple[str, ...], tuple[int, ...]]
CONFIG = ScheduleConfig(
    vocab_size=VOCAB, context_length=256, block_size=SIZE, num_blocks=NUM_BLOCKS, max_sequences=4, max_step_tokens=16
)


class Hasty(GiveUp):
    """Up now and then."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def __call__(self) -> bool:
        return self.rng.random() < 0.1


class Hesitant:
    """A tier that keeps everything, and makes everybody ask for it some times before it gives it."""

    root = root_key("echo")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.blocks: dict[bytes, BlockData] = {}

    def load(self, keys: Seq[bytes], *, wait: bool) -> tuple[BlockData, ...] | None:
        if not wait and self._rng.random() < 0.5:
            return None
        return tuple(self.blocks[key] for key in keys[: self.num_held(keys)])

    def num_held(self, keys: Seq[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def wants(self, key: bytes) -> bool:
        return key not in self.blocks

    def save(self, key: bytes, data: BlockData) -> None:
        assert key not in self.blocks, "saved twice"
        self.blocks[key] = data

    def stats(self) -> TierStats:
        return TierStats()


class World:
    """Runs requests through schedulers that come and go over one tier, and knows every prefix ever computed."""

    def __init__(self, tier: BlockTier, rng: random.Random, *, keeps_all: bool) -> None:
        self.tier, self.rng, self.keeps_all = tier, rng, keeps_all
        self.giving_up = random.Random(0)
        self.saved: set[Prefix] = set()
        """Full blocks that a step has completed with tokens that were known before it."""
        self.computed: set[Prefix] = set()
        """And those that drafts completed, too."""
        self.live: dict[str, SequenceSpec] = {}
        self.bounds: dict[str, tuple[int, int]] = {}
        """When a request was admitted: how many tokens of it had been saved, and computed."""
        self.answers: dict[str, list[int]] = {}
        self.num_loaded = self.num_finished = self.num_cached = self.num_preemptions = 0
        self.num_scored = self.num_pooled = 0
        self.restart()

    def restart(self) -> None:
        """Everything in the process is lost; the tier stays."""
        self.scheduler = Scheduler(CONFIG, self.tier)
        self.runner = EchoRunner(vocab_size=VOCAB, block_size=SIZE, num_blocks=NUM_BLOCKS)
        self.live.clear()

    def step(self) -> None:
        for name, spec in self.live.items():
            if self.rng.random() < 0.5:
                right = continuation((*spec.prompt_token_ids, *self.answers[name]), 3, VOCAB)
                self.scheduler.propose(name, (*right, 0)[self.rng.randrange(2) :])
        plan = self.scheduler.schedule()
        if plan is None:
            return
        self.num_preemptions += len(self.scheduler.changes.preempted)
        for name in self.scheduler.changes.admitted:
            spec = self.live[name]
            self.bounds.setdefault(name, (longest_of(spec, self.saved), longest_of(spec, self.computed)))
        self.check_loads(plan)
        self.runner.submit(plan, Hasty(self.giving_up))
        result = self.runner.wait()
        aborted = [name for name in self.live if self.rng.random() < 0.02]
        for name in aborted:
            assert self.scheduler.abort(name)
        if not result.given_up:
            self.note_computed(plan)
        for update in self.scheduler.commit(plan, result):
            name, spec = update.request_id, self.live[update.request_id]
            self.answers[name] += update.token_ids
            self.add(self.computed, spec, len(self.tokens_of(spec)) - 1)
            if update.prompt_logprobs is not None:
                self.check_scores(spec, update.prompt_logprobs)
            if update.finish_reason is not None:
                self.finish(spec, update)
                del self.live[name]
        for name in aborted:
            del self.live[name]
        self.scheduler.check()

    def check_scores(self, spec: SequenceSpec, found: tuple[TokenLogprob, ...]) -> None:
        """Of every token, however much of the prompt lay in a tier when it came back from a preemption."""
        prompt, self.num_scored = spec.prompt_token_ids, self.num_scored + 1
        assert found == tuple(prompt_logprob(prompt[:i], prompt[i], 2, VOCAB) for i in range(1, len(prompt)))

    def finish(self, spec: SequenceSpec, update: SequenceUpdate) -> None:
        name, num_cached = spec.request_id, update.num_cached_tokens
        assert self.answers[name] == continuation(spec.prompt_token_ids, len(self.answers[name]), VOCAB)
        self.num_finished += 1
        if spec.pool:
            ends = range(1, len(spec.prompt_token_ids) + 1)
            assert update.pooled is not None
            assert (update.pooled == sum(hidden_state(spec.prompt_token_ids[:end]) for end in ends)).all()
            self.num_pooled += 1
        if spec.pool or spec.sampling.num_prompt_logprobs is not None:
            assert num_cached == 0
            return
        self.num_cached += num_cached
        low, high = self.bounds[name]
        # Beyond its full blocks, a prompt may start from a copied part of one.
        assert num_cached < high + SIZE, "found what nobody computed in this namespace"
        assert not self.keeps_all or num_cached >= low, "missed what was saved"

    def tokens_of(self, spec: SequenceSpec) -> tuple[int, ...]:
        return (*spec.prompt_token_ids, *self.answers[spec.request_id])

    def add(self, book: set[Prefix], spec: SequenceSpec, num: int) -> None:
        """The first `num` tokens of a request lie in its blocks."""
        tokens = self.tokens_of(spec)
        book.update((spec.namespace, tokens[:end]) for end in range(SIZE, num + 1, SIZE))

    def in_flight(self) -> list[SequenceSpec]:
        """Whose rows the plan in flight has."""
        return [sequence.spec for sequence, _ in self.scheduler._chunks]

    def note_computed(self, plan: StepPlan) -> None:
        """What now lies in memory, read through the block tables."""
        for i, spec in enumerate(self.in_flight()):
            end = int(plan.first_positions[i] + plan.offsets[i + 1] - plan.offsets[i] - plan.num_drafts[i])
            assert tuple(self.runner._context(plan, i, end)) == self.tokens_of(spec)[:end]
            self.add(self.saved, spec, end)
            self.add(self.computed, spec, end)

    def check_loads(self, plan: StepPlan) -> None:
        """Each block that is loaded holds the tokens of its place in the sequence that it is loaded for."""
        if plan.loads is None:
            return
        content = dict(zip(plan.loads.blocks[0].tolist(), plan.loads.data, strict=True))
        assert len(content) == len(plan.loads.data), "a block is loaded twice"
        self.num_loaded += len(content)
        for i, spec in enumerate(self.in_flight()):
            tokens = self.tokens_of(spec)
            for index, block in enumerate(plan.block_tables[0][i].tolist()):
                if block in content:
                    expected = tokens[index * SIZE : (index + 1) * SIZE]
                    assert tuple(content.pop(block).view(np.int64).tolist()) == expected
                    assert (index + 1) * SIZE <= plan.first_positions[i]
        assert not content, "loaded for nobody"


def longest_of(spec: SequenceSpec, book: set[Prefix]) -> int:
    """How many tokens in full blocks; the last token of the prompt is always computed."""
    prompt, num = spec.prompt_token_ids, 0
    while num + SIZE < len(prompt) and (spec.namespace, prompt[: num + SIZE]) in book:
        num += SIZE
    return num


def play(world: World, rng: random.Random, num_requests: int) -> None:
    """Prompts that share stems of all lengths, in three namespaces, with restarts in between."""
    stems = [[rng.randrange(3) for _ in range(30)] for _ in range(2)]
    for number in range(num_requests):
        stem = rng.choice(stems)[: rng.randrange(30)]
        prompt = (*stem, *(rng.randrange(3) for _ in range(rng.randrange(1, 8))))
        name = f"r{number}"
        kind, num_output = rng.choice(["plain"] * 6 + ["scored", "pooled", "background"]), rng.randrange(1, 16)
        world.live[name] = SequenceSpec(
            name,
            prompt,
            Sampling(
                temperature=0,
                max_tokens=0 if kind == "pooled" else num_output,
                num_prompt_logprobs=2 if kind == "scored" else None,
            ),
            priority=BATCH_PRIORITY if kind == "background" else 0,
            namespace=rng.choice([(), (), ("salt", "a"), ("adapter", "a")]),
            pool=kind == "pooled",
        )
        world.answers[name] = []
        world.scheduler.add(world.live[name])
        for _ in range(rng.randrange(4)):
            world.step()
        if rng.random() < 0.05:
            world.restart()
    while world.live:
        world.step()


@pytest.mark.parametrize("seed", range(12))
def test_everything_that_was_computed_is_found_again(seed: int) -> None:
    rng = random.Random(seed)
    world = World(Hesitant(rng), rng, keeps_all=True)
    play(world, rng, 400)
    assert world.num_loaded > 100 and world.num_finished > 100 and world.num_cached > 500
    assert world.num_preemptions > 0 and world.num_scored > 10 and world.num_pooled > 10


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["memory", "disk", "both", "tiny"])
def test_a_real_store_never_gives_a_wrong_block(kind: str, seed: int, tmp_path: Path) -> None:
    block_bytes = EchoRunner(block_size=SIZE).info.block_bytes
    rng = random.Random(seed)
    config = StoreConfig(
        memory_bytes={"memory": 1 << 20, "both": 3 * block_bytes, "tiny": 4 * block_bytes}.get(kind, 0),
        folder=tmp_path if kind != "memory" else None,
        disk_bytes=1 << 20 if kind != "tiny" else 40 * block_bytes,
        patience_s=60.0,
    )
    store = BlockStore(config, identity="echo", block_bytes=block_bytes, clock=RealClock())
    try:
        world = World(store, rng, keeps_all=kind == "memory")
        play(world, rng, 150)
        assert world.num_loaded > 10
        stats = store.stats()
        assert (stats.damaged_blocks, stats.failures, stats.dropped_blocks) == (0, 0, 0)
    finally:
        store.close()

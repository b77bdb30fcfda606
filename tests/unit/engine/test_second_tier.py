"""What a second tier of the prefix cache means for requests: after restarts, under pressure, and beside each other."""

from __future__ import annotations

import queue
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from inferloop.core.clock import RealClock
from inferloop.core.ids import TraceContext
from inferloop.core.request import BATCH_PRIORITY, Sampling, TokenRequest
from inferloop.engine.blockstore.store import BlockStore, StoreConfig
from inferloop.engine.compute.echo import EchoRunner, continuation
from inferloop.engine.config import EngineConfig
from inferloop.engine.loop import Engine
from inferloop.engine.roster import TokenUpdate
from inferloop.engine.schedule.keys import root_key
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import BlockData, StepPlan
from inferloop.engine.stats import TierStats

SIZE, VOCAB = 4, 97
PROMPT = tuple((7 * i + 2) % VOCAB for i in range(21))


class Shelf:
    """A tier that keeps everything; `slow` blocks are on their way for that many calls."""

    root = root_key("shelf")

    def __init__(self) -> None:
        self.blocks: dict[bytes, BlockData] = {}
        self.num_calls_left = 0
        self.waits: list[bool] = []

    def load(self, keys: Seq[bytes], *, wait: bool) -> tuple[BlockData, ...] | None:
        self.waits.append(wait)
        if not wait and self.num_calls_left:
            self.num_calls_left -= 1
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


class Rig:
    """A fresh scheduler and runner over a tier that was there before."""

    def __init__(self, tier: Shelf, *, num_blocks: int = 32, max_step_tokens: int = 64) -> None:
        self.runner = EchoRunner(vocab_size=VOCAB, block_size=SIZE, num_blocks=num_blocks)
        config = ScheduleConfig(
            vocab_size=VOCAB,
            context_length=256,
            block_size=SIZE,
            num_blocks=num_blocks,
            max_sequences=4,
            max_step_tokens=max_step_tokens,
        )
        self.scheduler = Scheduler(config, tier)
        self.answers: dict[str, list[int]] = {}
        self.num_cached: dict[str, int] = {}
        self.plans: list[StepPlan] = []

    def add(self, name: str, prompt: tuple[int, ...] = PROMPT, num: int = 3, **fields: object) -> None:
        spec = SequenceSpec(name, prompt, Sampling(temperature=0, max_tokens=num), **fields)  # type: ignore[arg-type]
        self.answers[name] = []
        self.scheduler.add(spec)

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.plans.append(plan)
        self.runner.submit(plan)
        for update in self.scheduler.commit(plan, self.runner.wait()):
            self.answers[update.request_id] += update.token_ids
            self.num_cached[update.request_id] = update.num_cached_tokens
        self.scheduler.check()
        return True

    def run(self) -> None:
        while self.step():
            pass

    @property
    def num_saved(self) -> int:
        return sum(len(plan.saves[0]) for plan in self.plans if plan.saves)

    @property
    def num_loaded(self) -> int:
        return sum(len(plan.loads.data) for plan in self.plans if plan.loads is not None)


def test_a_new_process_starts_where_the_last_one_ended() -> None:
    shelf = Shelf()
    first = Rig(shelf)
    first.add("a")
    first.run()
    assert (first.num_cached["a"], first.num_loaded, first.num_saved) == (0, 0, 5)
    second = Rig(shelf)
    second.add("b")
    second.run()
    assert second.answers["b"] == first.answers["a"] == continuation(PROMPT, 3, VOCAB)
    assert (second.num_cached["b"], second.num_loaded, second.num_saved) == (20, 5, 0)
    assert second.plans[0].num_tokens == 1
    stats = second.scheduler.tier_stats
    assert stats is not None and (stats.queries, stats.hits) == (21, 20)
    assert (second.scheduler.num_prefix_queries, second.scheduler.num_prefix_hits) == (21, 20)


def test_what_was_loaded_is_shared_as_if_it_had_been_computed() -> None:
    shelf = Shelf()
    first = Rig(shelf)
    first.add("a")
    first.run()
    second = Rig(shelf)
    second.add("b")
    second.run()
    second.add("c")
    second.run()
    stats = second.scheduler.tier_stats
    assert second.num_cached["c"] == 20 and second.num_loaded == 5
    assert stats is not None and stats.hits == 20, "the third request found it in the first tier"


def test_a_prompt_begins_in_one_tier_and_goes_on_in_the_other() -> None:
    shelf = Shelf()
    first = Rig(shelf)
    first.add("long", PROMPT)
    first.run()
    second = Rig(shelf)
    second.add("short", PROMPT[:9])
    second.run()
    second.add("long", PROMPT)
    second.run()
    assert second.num_cached == {"short": 8, "long": 20}
    assert second.num_loaded == 5, "two blocks for the first prompt, three for the second"


def test_an_answer_is_saved_as_well_for_the_next_turn() -> None:
    shelf = Shelf()
    first = Rig(shelf)
    first.add("turn 1", num=9)
    first.run()
    second = Rig(shelf)
    second.add("turn 2", (*PROMPT, *first.answers["turn 1"], 1, 2))
    second.run()
    assert second.num_cached["turn 2"] == 28, "29 tokens were computed"


def test_full_hits_compute_the_last_token() -> None:
    shelf = Shelf()
    first = Rig(shelf)
    first.add("a", PROMPT[:16], num=5)
    first.run()
    second = Rig(shelf)
    second.add("b", PROMPT[:16])
    second.run()
    assert second.num_cached["b"] == 12
    assert second.answers["b"] == continuation(PROMPT[:16], 3, VOCAB)


@pytest.mark.parametrize("namespace", [("salt", "x"), ("adapter", "x")])
def test_namespaces_do_not_meet_in_the_tier(namespace: tuple[str, ...]) -> None:
    shelf = Shelf()
    first = Rig(shelf)
    first.add("a", namespace=namespace)
    first.run()
    second = Rig(shelf)
    for number, other in enumerate([(), ("salt", "x"), ("adapter", "x"), ("salt", "y")]):
        second.add(f"{number}", namespace=other)
        second.run()
        assert second.num_cached[f"{number}"] == (20 if other == namespace else 0)


def test_log_probabilities_of_a_prompt_are_computed_not_found() -> None:
    shelf = Shelf()
    first = Rig(shelf)
    first.add("a")
    first.run()
    second = Rig(shelf)
    sampling = Sampling(temperature=0, max_tokens=2, num_prompt_logprobs=1)
    second.answers["b"] = []
    second.scheduler.add(SequenceSpec("b", PROMPT, sampling))
    second.run()
    assert (second.num_cached["b"], second.num_loaded) == (0, 0)
    stats = second.scheduler.tier_stats
    assert stats is not None and stats.queries == 0


def test_what_gave_way_comes_back_without_being_computed_again() -> None:
    """Two answers that outgrow the pool: whoever is preempted has its blocks in the tier."""
    shelf = Shelf()
    rig = Rig(shelf, num_blocks=12)
    prompts = {"a": PROMPT[:12], "b": tuple(reversed(PROMPT))[:12]}
    for name, prompt in prompts.items():
        rig.add(name, prompt, num=30)
    rig.run()
    assert rig.scheduler.num_preemptions > 0
    assert rig.num_loaded > 0
    for name, prompt in prompts.items():
        assert rig.answers[name] == continuation(prompt, 30, VOCAB)
    assert set(rig.num_cached.values()) == {0}, "what is loaded later does not count as cached"


def test_running_requests_go_on_while_blocks_are_on_their_way() -> None:
    shelf = Shelf()
    first = Rig(shelf)
    first.add("a")
    first.run()
    second = Rig(shelf)
    second.add("other", tuple(range(50, 60)), num=12)
    second.step()
    shelf.num_calls_left, shelf.waits = 4, []
    second.add("b")
    for _ in range(4):
        second.step()
        assert "b" not in second.num_cached
    assert len(second.answers["other"]) == 5
    second.run()
    assert second.num_cached["b"] == 20
    assert shelf.waits == [False] * 5
    # And with nothing else to do there is nothing else to do.
    shelf.num_calls_left, shelf.waits = 9, []
    third = Rig(shelf)
    third.add("c")
    third.step()
    assert shelf.waits == [True] and third.num_cached["c"] == 20


def test_background_work_is_not_put_back_for_blocks_that_are_on_their_way() -> None:
    shelf = Shelf()
    first = Rig(shelf)
    first.add("a")
    first.run()
    second = Rig(shelf)
    second.add("background", tuple(range(30, 40)), num=12, priority=BATCH_PRIORITY)
    second.step()
    second.add("other", tuple(range(50, 60)), num=12)
    second.step()
    shelf.num_calls_left = 3
    second.add("b")
    second.run()
    assert second.num_cached["b"] == 20
    assert second.scheduler.num_preemptions == 0
    assert second.answers["background"] == continuation(tuple(range(30, 40)), 12, VOCAB)


def test_who_waits_is_not_given_up_for_what_the_tier_has() -> None:
    """What would have to be computed decides who can no longer be in time."""
    shelf = Shelf()
    first = Rig(shelf)
    first.add("a")
    assert first.scheduler.num_uncached("a") == 21
    first.run()
    second = Rig(shelf)
    second.add("b")
    second.add("salted", namespace=("salt", "x"))
    assert (second.scheduler.num_uncached("b"), second.scheduler.num_uncached("salted")) == (1, 21)
    assert shelf.waits == [True], "nothing was loaded to find out"


def test_an_abort_while_blocks_are_on_their_way_leaves_nothing_behind() -> None:
    shelf = Shelf()
    first = Rig(shelf)
    first.add("a")
    first.run()
    second = Rig(shelf)
    second.add("other", tuple(range(50, 60)), num=12)
    second.step()
    shelf.num_calls_left = 2
    second.add("b")
    second.step()
    second.scheduler.abort("b")
    second.run()
    assert second.scheduler.num_blocks_used == 0
    assert second.answers["other"] == continuation(tuple(range(50, 60)), 12, VOCAB)


def test_a_step_catches_up_with_no_more_than_it_could_complete() -> None:
    """A long prompt that nobody saved yet, because the tier is new, is offered over several steps."""
    old = Shelf()
    rig = Rig(old, max_step_tokens=8, num_blocks=64)
    long = tuple(i % VOCAB for i in range(161))
    rig.add("a", long)
    rig.run()
    old.blocks.clear()
    before = len(rig.plans)
    rig.add("b", long, num=20)
    rig.run()
    sizes = [len(plan.saves[0]) for plan in rig.plans[before:] if plan.saves]
    assert sum(sizes) >= 40 and max(sizes) <= 2 + 4  # two blocks of tokens, and one for each sequence
    assert rig.answers["b"] == continuation(long, 20, VOCAB)


def test_an_engine_finds_what_another_process_stored(tmp_path: Path) -> None:
    found = []
    for life in range(2):
        runner = EchoRunner(vocab_size=VOCAB, block_size=SIZE)
        config = StoreConfig(folder=tmp_path, patience_s=30.0)
        store = BlockStore(config, identity="echo", block_bytes=runner.info.block_bytes, clock=RealClock())
        batches: queue.Queue[Seq[TokenUpdate]] = queue.Queue()
        engine = Engine(runner, EngineConfig(), RealClock(), batches.put, store)
        engine.start()
        engine.submit(TokenRequest("a", PROMPT, Sampling(max_tokens=5), TraceContext.new(), 0))
        updates: list[TokenUpdate] = []
        while not updates or updates[-1].finish_reason is None:
            updates += batches.get(timeout=30)
        found.append(([t for u in updates for t in u.token_ids], updates[-1].num_cached_tokens))
        engine.stop()
        store.close()
        stats = engine.stats().tier
        assert stats is not None and stats.hits == 20 * life
        assert stats.disk_bytes > stats.saved_bytes >= 6 * runner.info.block_bytes * (1 - life)
    assert found == [(continuation(PROMPT, 5, VOCAB), 0), (continuation(PROMPT, 5, VOCAB), 20)]

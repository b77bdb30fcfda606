"""What sharing beginnings means for sequences: fewer tokens computed, the same tokens out, nobody else's memory."""

from __future__ import annotations

import random

from inferloop.core.request import Sampling
from inferloop.engine.compute.echo import EchoRunner, continuation
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec, SequenceUpdate

SIZE, VOCAB = 4, 97


class Rig:
    """A scheduler over an EchoRunner that counts the tokens it computes."""

    def __init__(self, *, num_blocks: int = 64, share_prefixes: bool = True, max_sequences: int = 8) -> None:
        self.runner = EchoRunner(vocab_size=VOCAB, block_size=SIZE, num_blocks=num_blocks)
        self.scheduler = Scheduler(
            ScheduleConfig(
                vocab_size=VOCAB,
                context_length=256,
                block_size=SIZE,
                num_blocks=num_blocks,
                max_sequences=max_sequences,
                share_prefixes=share_prefixes,
            )
        )
        self.num_computed = 0

    def run(self, *specs: SequenceSpec) -> dict[str, list[SequenceUpdate]]:
        for spec in specs:
            self.scheduler.add(spec)
        updates: dict[str, list[SequenceUpdate]] = {spec.request_id: [] for spec in specs}
        while (plan := self.scheduler.schedule()) is not None:
            self.num_computed += plan.num_tokens
            self.runner.submit(plan)
            for update in self.scheduler.commit(plan, self.runner.wait()):
                updates[update.request_id].append(update)
            self.scheduler.check()
        return updates


def spec(name: str, prompt: list[int], num: int = 3, namespace: tuple[str, ...] = ()) -> SequenceSpec:
    return SequenceSpec(name, tuple(prompt), Sampling(temperature=0, max_tokens=num), namespace=namespace)


def answers(updates: dict[str, list[SequenceUpdate]]) -> dict[str, list[int]]:
    return {name: [t for u in found for t in u.token_ids] for name, found in updates.items()}


def test_a_repeated_prompt_computes_one_token_of_it() -> None:
    rig, prompt = Rig(), list(range(16))
    rig.run(spec("first", prompt))
    before = rig.num_computed
    second = rig.run(spec("second", prompt))
    assert second["second"][-1].num_cached_tokens == 15
    assert rig.num_computed - before == 1 + 2  # the last token of the prompt, and two of the three generated ones
    assert answers(second)["second"] == continuation(prompt, 3, VOCAB)
    assert (rig.scheduler.num_prefix_queries, rig.scheduler.num_prefix_hits) == (32, 15)


def test_a_beginning_that_ends_inside_a_block_is_copied() -> None:
    rig = Rig()
    rig.run(spec("first", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    found = rig.run(spec("second", [1, 2, 3, 4, 5, 6, 70, 80, 90]), spec("third", [1, 2, 3, 4, 5, 60]))
    assert [found[name][-1].num_cached_tokens for name in ("second", "third")] == [6, 5]
    assert answers(found)["second"] == continuation([1, 2, 3, 4, 5, 6, 70, 80, 90], 3, VOCAB)
    assert answers(found)["third"] == continuation([1, 2, 3, 4, 5, 60], 3, VOCAB)


def test_a_conversation_finds_the_answer_it_goes_on_from() -> None:
    rig, prompt = Rig(), list(range(10))
    answer = answers(rig.run(spec("turn1", prompt, 6)))["turn1"]
    found = rig.run(spec("turn2", [*prompt, *answer, 50, 51]))
    assert found["turn2"][-1].num_cached_tokens == 12  # whole blocks of the 15 that were computed; then others


def test_namespaces_never_meet_even_when_their_names_look_alike() -> None:
    rig, prompt = Rig(), list(range(16))
    rig.run(spec("base", prompt), spec("adapter", prompt, namespace=("adapter", "x")))
    found = rig.run(spec("salted", prompt, namespace=("salt", "x")))
    assert found["salted"][-1].num_cached_tokens == 0


def test_running_sequences_share_as_soon_as_a_block_is_computed() -> None:
    rig = Rig(num_blocks=12, max_sequences=4)
    prompt = list(range(24))
    rig.run(spec("first", prompt, 1))
    found = rig.run(*(spec(f"s{i}", [*prompt, i], 8) for i in range(4)))
    assert all(updates[-1].num_cached_tokens == 24 for updates in found.values())
    assert rig.scheduler.num_preemptions == 0  # four copies of 24 tokens would not have fitted


def test_memory_in_use_returns_to_nothing_and_can_all_be_had_again() -> None:
    rig = Rig(num_blocks=16)
    for i in range(20):
        rig.run(spec(f"s{i}", [i * 2 + j % 2 for j in range(30)], 5))
        assert rig.scheduler.num_blocks_used == 0
    whole = [90] * (16 * SIZE - 4)
    assert answers(rig.run(spec("whole", whole, 5)))["whole"] == continuation(whole, 5, VOCAB)


def test_sharing_changes_no_token_under_pressure() -> None:
    rng = random.Random(7)
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(3, 20))] for _ in range(3)]
    specs = []
    for i in range(60):
        prompt = rng.choice(stems)[: rng.randrange(1, 20)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
        specs.append(spec(f"s{i}", prompt, rng.randrange(8, 30), rng.choice([(), ("salt", "t")])))
    tight, plain = Rig(num_blocks=14), Rig(share_prefixes=False)
    shared, alone = tight.run(*specs), plain.run(*specs)
    assert answers(shared) == answers(alone)
    assert tight.scheduler.num_preemptions > 0 and tight.scheduler.num_prefix_hits > 0

"""All that the engine can do at the same time, on far too little memory, with callers that leave at any moment: every
answer that comes is the one true continuation, everybody gets an end, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import PATIENCE_S, until

from inferloop.backends import bytecodec
from inferloop.backends.native import NativeGenerator
from inferloop.backends.protocols import Delta, EmbedRequest, GenerateRequest, Prompt
from inferloop.core.clock import RealClock
from inferloop.core.errors import OverloadedError
from inferloop.core.ids import TraceContext
from inferloop.core.request import BATCH_PRIORITY, Sampling
from inferloop.engine.blockstore.store import BlockStore, StoreConfig
from inferloop.engine.compute.echo import EchoRunner, continuation, hidden_state, prompt_logprob
from inferloop.engine.compute.runner import GiveUp, never
from inferloop.engine.config import EngineConfig
from inferloop.engine.schedule.pace import StepLimits
from inferloop.engine.schedule.scheduler import NO_LIMITS, Scheduler
from inferloop.engine.schedule.step import StepPlan, StepResult
from inferloop.models.identity import ServingIdentity

VOCAB = bytecodec.VOCAB_SIZE
STEMS = tuple(bytes(random.Random(i).randrange(97, 123) for _ in range(60)).decode() for i in range(3))


class Checked(Scheduler):
    """Checks itself before every step, and guesses what follows: mostly right, sometimes not."""

    rng = random.Random(0)

    def schedule(self, limits: StepLimits = NO_LIMITS) -> StepPlan | None:
        self.check()
        for sequence in self._running:
            if self.rng.random() < 0.3:
                right = continuation(sequence.token_ids, self.rng.randrange(4), VOCAB)
                self.propose(sequence.spec.request_id, (*right, self.rng.randrange(VOCAB)))
        return super().schedule(limits)


class Hasty(GiveUp):
    """Up when `asked` is, and now and then when nobody asked."""

    def __init__(self, asked: GiveUp, rng: random.Random) -> None:
        super().__init__()
        self.asked, self.rng = asked, rng

    def __call__(self) -> bool:
        return self.asked() or self.rng.random() < 0.1


class HastyRunner(EchoRunner):
    """Gives steps up more often than anybody asks for it, where it may, and counts them."""

    rng = random.Random(0)
    num_given_up = 0

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        super().submit(plan, give_up if give_up is never else Hasty(give_up, self.rng))

    def wait(self) -> StepResult:
        result = super().wait()
        self.num_given_up += result.given_up
        return result


class World:
    """One generator, and callers. `counts` says what became of them."""

    def __init__(self, generator: NativeGenerator, rng: random.Random) -> None:
        self.generator, self.rng, self.counts = generator, rng, Counter[str]()
        self.share_of_background = 0.1

    @property
    def has_seen_all(self) -> bool:
        """The slower the machine, the fewer are served of those who come at once where few may wait."""
        return min(self.counts[what] for what in ("answered", "embedded", "left")) > 10

    def prompt(self) -> str:
        rng = self.rng
        return rng.choice(STEMS)[: rng.randrange(60)] + rng.choice(("a", "bc", "def"))

    async def call(self) -> None:
        """Ask for something, and leave at some moment or stay."""
        rng = self.rng
        await asyncio.sleep(rng.choice((0, 0.03)) * rng.random())
        stays = rng.random() < 0.5
        patience_s = PATIENCE_S if stays else rng.random() ** 2 * 0.1
        try:
            async with asyncio.timeout(patience_s):
                await (self.embed() if rng.random() < 0.15 else self.generate())
        except TimeoutError:
            assert not stays, "no end"
            self.counts["left"] += 1
        except OverloadedError as error:
            assert error.retry_after_s >= 1 and error.reason in ("queue_full", "queue_tokens", "late")
            self.counts[error.reason] += 1

    async def generate(self) -> None:
        rng, prompt = self.rng, self.prompt()
        num = rng.choice((None, 0, 1, 5, 30, 80))
        scores = rng.randrange(4) if num == 0 or rng.random() < 0.2 else None
        sampling = Sampling(
            max_tokens=num,
            cut_max_tokens=num is not None and num > 0,
            num_logprobs=rng.choice((None, 0)),
            num_prompt_logprobs=scores,
            stop=("never in there",) if rng.random() < 0.3 else (),
        )
        request = GenerateRequest(
            "same id", TraceContext.new(), Prompt(text=prompt), sampling, RealClock().now_ns(), **self.place()
        )
        async with contextlib.aclosing(self.generator.generate(request)) as coming:
            deltas = [delta async for delta in coming]
        self.check(list(prompt.encode()), num, scores, deltas)
        self.counts["answered"] += 1

    def place(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "priority": BATCH_PRIORITY if rng.random() < self.share_of_background else rng.choice((0, 0, -5, 7)),
            "cache_salt": rng.choice(("", "", "a", "b")),
        }

    def check(self, prompt: list[int], num: int | None, scores: int | None, deltas: list[Delta]) -> None:
        room = self.generator.describe()[0].context_length - len(prompt)
        expected = continuation(prompt, room if num is None else min(num, room), VOCAB)
        ids = [i for delta in deltas for i in delta.token_ids]
        assert ids == expected
        assert "".join(delta.text for delta in deltas) == bytecodec.decode(expected)
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert all(len(d.logprobs) == len(d.token_ids) for d in deltas if d.logprobs is not None)
        told = deltas[0].prompt_logprobs
        if scores is not None:
            pairs = range(1, len(prompt))
            assert told == tuple(prompt_logprob(prompt[:i], prompt[i], scores, VOCAB) for i in pairs)
            assert deltas[0].num_cached_tokens == 0
        self.counts["cached"] += deltas[0].num_cached_tokens > 0

    async def embed(self) -> None:
        prompt = tuple(self.prompt().encode())
        request = EmbedRequest("same id", TraceContext.new(), prompt, 0, 0, **self.place())
        found = await self.generator.embed(request)
        mean = np.mean([hidden_state(prompt[: i + 1]) for i in range(len(prompt))], axis=0)
        assert found.vector.tolist() == (mean / np.linalg.norm(mean)).astype(np.float32).tolist()
        self.counts["embedded"] += 1


@pytest.mark.parametrize(
    ("seed", "config"),
    [
        (1, {}),
        (2, {"tpot_objective_ms": 1.0}),
        (3, {"max_ttft_ms": 30.0}),
        (4, {"max_waiting": 3, "max_sequences": 3}),
        (5, {"max_step_tokens": 5}),
        (6, {"share_prefixes": False}),
    ],
)
async def test_everything_at_once(
    seed: int, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferloop.engine.loop.Scheduler", Checked)
    rng = random.Random(seed)
    runner = HastyRunner(vocab_size=VOCAB, context_length=128, block_size=4, num_blocks=34)
    block_bytes = runner.info.block_bytes
    store = BlockStore(
        StoreConfig(memory_bytes=10 * block_bytes, folder=tmp_path, disk_bytes=400 * block_bytes),
        identity="echo",
        block_bytes=block_bytes,
        clock=RealClock(),
    )
    given = EngineConfig(**{"max_sequences": 6, "max_step_tokens": 24, "max_waiting": 30, **config})
    identity = ServingIdentity("m", "w", "none", "echo", "1", "t", "c")
    made = NativeGenerator(
        bytecodec.ByteCodec(), runner, given, identity, store=store if given.share_prefixes else None
    )
    made.start()
    world = World(made, rng)
    try:
        for number in range(300):
            if number >= 30 and world.has_seen_all:
                break
            world.share_of_background = 0.8 if number % 3 == 0 else 0.1
            async with asyncio.TaskGroup() as group:
                for _ in range(rng.randrange(1, 25)):
                    group.create_task(world.call())
        await until(lambda: not (now := made.describe()[1]).num_running + now.num_waiting + now.kv_blocks_used)
        _, stats = made.describe()
        assert stats.alive
        assert made._receivers == {}
    finally:
        await asyncio.to_thread(made.stop)
        store.close()
    counts = world.counts
    assert runner.num_given_up > 0, "no step of background work was given up"
    assert stats.num_preemptions > 0 and world.has_seen_all, counts
    if given.share_prefixes:
        assert counts["cached"] > 0 and stats.tier is not None and stats.tier.hits > 0

"""Every way of choosing tokens at the same time, on too little memory, with callers that leave: in deterministic mode
each answer is the one that its request gets alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from inferloop.backends.native import NativeGenerator
from inferloop.backends.protocols import Delta, GenerateRequest, Prompt
from inferloop.core.clock import RealClock
from inferloop.core.ids import TraceContext
from inferloop.core.request import BATCH_PRIORITY, Grammar, Sampling
from inferloop.engine.blockstore.store import BlockStore, StoreConfig
from inferloop.engine.compute.runner import GiveUp, never
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.config import EngineConfig
from inferloop.engine.schedule.step import StepPlan, StepResult
from inferloop.engine.text.codec import Codec
from inferloop.models.identity import ServingIdentity
from inferloop.models.resolve import ModelFiles, open_files

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
STEM = "abcabcabdabcabcabe"
BASE = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
KINDS = (
    BASE,
    replace(BASE, max_tokens=90),
    replace(BASE, temperature=1.0, seed=1),
    replace(BASE, temperature=1.3, seed=2, top_p=0.8, num_logprobs=2),
    replace(BASE, temperature=0.7, seed=3, top_k=9, min_p=0.05),
    replace(BASE, frequency_penalty=0.5, presence_penalty=0.3),
    replace(BASE, temperature=1.0, seed=4, repetition_penalty=1.3, num_logprobs=0),
    replace(BASE, logit_bias=((97, 3.0), (98, -100.0)), num_prompt_logprobs=1),
    replace(BASE, min_tokens=10, stop_token_ids=tuple(range(64))),
    replace(BASE, ignore_eos=False, grammar=Grammar("json_schema", SCHEMA), temperature=1.0, seed=5),
    replace(BASE, ignore_eos=False, grammar=Grammar("regex", "[a-c]{3,30}x"), num_logprobs=1),
    replace(BASE, max_tokens=0, num_prompt_logprobs=2),
)
Answer = tuple[Any, ...]


class Hasty(GiveUp):
    """Up when `asked` is, and now and then when nobody asked."""

    def __init__(self, asked: GiveUp, rng: random.Random) -> None:
        super().__init__()
        self.asked, self.rng = asked, rng

    def __call__(self) -> bool:
        return self.asked() or self.rng.random() < 0.1


class HastyRunner(TorchRunner):
    """Gives steps up more often than anybody asks for it, where it may, and counts them."""

    rng = random.Random(0)
    num_given_up = 0

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        super().submit(plan, give_up if give_up is never else Hasty(give_up, self.rng))

    def wait(self) -> StepResult:
        result = super().wait()
        HastyRunner.num_given_up += result.given_up
        return result


@pytest.fixture
def files(tiny_directory: Callable[..., Path]) -> ModelFiles:
    return open_files("m", tiny_directory(max_position_embeddings=256))


@contextlib.asynccontextmanager
async def generator(files: ModelFiles, store_folder: Path | None, **config: Any) -> Any:
    runner = HastyRunner.load(files, TorchConfig(dtype="fp32", deterministic=True, num_blocks=20, block_size=8))
    codec = Codec(files)
    identity = ServingIdentity("m", "w", "none", "torch", "1", "t", "c")
    info = runner.info
    store = store_folder and BlockStore(
        StoreConfig(memory_bytes=8 * info.block_bytes, folder=store_folder),
        identity="tiny",
        block_bytes=info.block_bytes,
        clock=RealClock(),
    )
    given = EngineConfig(eos_token_ids=codec.tokenizer.eos_token_ids, **config)
    made = NativeGenerator(codec, runner, given, identity, store=store or None)
    made.start()
    try:
        yield made
    finally:
        await asyncio.to_thread(made.stop)


async def ask(made: NativeGenerator, prompt: str, sampling: Sampling, **fields: Any) -> Answer:
    """What may not depend on anything but prompt and sampling."""
    request = GenerateRequest("r", TraceContext.new(), Prompt(text=prompt), sampling, RealClock().now_ns(), **fields)
    async with contextlib.aclosing(made.generate(request)) as coming:
        deltas: list[Delta] = [delta async for delta in coming]
    ids = tuple(i for delta in deltas for i in delta.token_ids)
    logprobs = tuple(lp for delta in deltas for lp in delta.logprobs or ())
    text = "".join(delta.text for delta in deltas)
    return text, ids, logprobs, deltas[0].prompt_logprobs, deltas[-1].finish_reason, deltas[-1].stop_reason


@pytest.mark.parametrize("seed", range(1))
async def test_everybody_gets_the_answer_that_they_get_alone(seed: int, files: ModelFiles, tmp_path: Path) -> None:
    rng = random.Random(seed)
    prompts = [STEM[: rng.randrange(1, 18)] + rng.choice("xyz") * rng.randrange(1, 20) for _ in range(6)]
    async with generator(files, None, max_sequences=1, share_prefixes=False) as alone:
        truth = {(p, s): await ask(alone, p, s) for p in prompts for s in KINDS}
    num_equal = num_left = 0

    async def call(made: NativeGenerator) -> None:
        nonlocal num_equal, num_left
        prompt, sampling = rng.choice(list(truth))
        fields = {"priority": rng.choice((0, 0, -3, 4, BATCH_PRIORITY)), "cache_salt": rng.choice(("", "", "a"))}
        try:
            async with asyncio.timeout(None if rng.random() < 0.6 else rng.random() ** 2):
                found = await ask(made, prompt, sampling, **fields)
        except TimeoutError:
            num_left += 1
            return
        assert found == truth[prompt, sampling], (prompt, sampling)
        num_equal += 1

    async with generator(files, tmp_path, max_sequences=6, max_step_tokens=24, max_waiting=64) as made:
        for _ in range(8):
            async with asyncio.TaskGroup() as group:
                for _ in range(rng.randrange(4, 24)):
                    group.create_task(call(made))

        def is_empty() -> bool:
            now = made.describe()[1]
            return bool(now.num_running == now.num_waiting == now.kv_blocks_used == 0)

        await until(is_empty)
        stats = made.describe()[1]
    assert num_equal > 20 and num_left > 0 and stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0 and stats.tier is not None and stats.tier.hits > 0
    assert HastyRunner.num_given_up > 0

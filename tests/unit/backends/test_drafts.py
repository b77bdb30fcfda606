"""Guessed tokens, several of which may be accepted in one step, change nothing that a client sees: not where an answer
stops, nor how, nor what is counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from inferloop.backends import bytecodec
from inferloop.backends.native import NativeGenerator
from inferloop.backends.protocols import GenerateRequest, Prompt
from inferloop.core.ids import TraceContext
from inferloop.core.request import Sampling
from inferloop.engine.compute import echo
from inferloop.engine.config import EngineConfig
from inferloop.engine.schedule.pace import StepLimits
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.step import StepPlan
from inferloop.models.identity import ServingIdentity

LIST = b"red, green, blue; "
NUM_GRAM = 3


def of_a_list(context: Sequence[int], _: int) -> int:
    """A model that repeats a list for ever."""
    return LIST[len(context) % len(LIST)]


def n_gram(tokens: Sequence[int], num: int) -> tuple[int, ...]:
    """What followed the last few tokens the time before."""
    last = list(tokens[-NUM_GRAM:])
    for at in range(len(tokens) - NUM_GRAM - 1, -1, -1):
        if list(tokens[at : at + NUM_GRAM]) == last:
            return tuple(tokens[at + NUM_GRAM : at + NUM_GRAM + num])
    return ()


class Drafting(Scheduler):
    """Guesses `num_drafts` tokens for everybody before each step; every `wrong_every`-th guess has a wrong token."""

    num_drafts = 0
    wrong_every = 0
    num_guesses = 0

    def schedule(self, limits: StepLimits = StepLimits()) -> StepPlan | None:  # noqa: B008  frozen
        for sequence in self._running:
            guess = n_gram(sequence.token_ids, self.num_drafts)
            self.num_guesses += 1
            if self.wrong_every and self.num_guesses % self.wrong_every == 0 and guess:
                guess = (*guess[:-1], bytecodec.START)
            self.propose(sequence.spec.request_id, guess)
        return super().schedule(limits)


@pytest.fixture(autouse=True)
def repeats_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "next_token", of_a_list)
    monkeypatch.setattr("inferloop.engine.loop.Scheduler", Drafting)


@contextlib.asynccontextmanager
async def generator(**config: Any) -> AsyncIterator[NativeGenerator]:
    runner = echo.EchoRunner(vocab_size=bytecodec.VOCAB_SIZE, context_length=256, block_size=4, num_blocks=256)
    identity = ServingIdentity("m", "w", "none", "echo", "1", "t", "c")
    made = NativeGenerator(bytecodec.ByteCodec(), runner, EngineConfig(**config), identity)
    made.start()
    try:
        yield made
    finally:
        await asyncio.to_thread(made.stop)


async def seen(sampling: Sampling, monkeypatch: pytest.MonkeyPatch, num_drafts: int, wrong_every: int = 0) -> Any:
    """(what the client sees, steps it took)."""
    monkeypatch.setattr(Drafting, "num_drafts", num_drafts)
    monkeypatch.setattr(Drafting, "wrong_every", wrong_every)
    async with generator(eos_token_ids=(bytecodec.END,)) as made:
        request = GenerateRequest("r", TraceContext.new(), Prompt(text=PROMPT), sampling, 0)
        deltas = [delta async for delta in made.generate(request)]
        num_steps = made.describe()[1].step_counter
    ids = [i for delta in deltas for i in delta.token_ids]
    logprobs = [lp for delta in deltas for lp in delta.logprobs or ()]
    text = "".join(delta.text for delta in deltas)
    return (text, ids, len(logprobs), deltas[-1].finish_reason, deltas[-1].stop_reason), num_steps


PROMPT = "List: "
ANSWER = bytes(LIST[(len(PROMPT) + i) % len(LIST)] for i in range(200)).decode()
STOP = ANSWER[11:50]
"""Two rounds of the list, so that it ends for the first time at token 50: in the middle of a run that drafts guess."""


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=52, stop=(STOP,), num_logprobs=0),
        Sampling(max_tokens=50, stop=(STOP,), num_logprobs=0),
        Sampling(max_tokens=49, stop=(STOP,), num_logprobs=0),
        Sampling(max_tokens=60, stop=("u", "e; "), min_tokens=48, num_logprobs=0),
        Sampling(max_tokens=60, stop_token_ids=(LIST[8],), min_tokens=50, num_logprobs=0),
        Sampling(max_tokens=77, num_logprobs=0, stop=("never",)),
        Sampling(max_tokens=1, num_logprobs=0),
    ],
)
async def test_drafts_change_the_steps_and_nothing_else(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, num_plain_steps = await seen(sampling, monkeypatch, 0)
    _, ids, num_logprobs, finish, _ = plain
    assert finish in ("stop", "length") and num_logprobs == len(ids) <= (sampling.max_tokens or 0)
    for num_drafts in (1, 2, 5, 8, 30):
        for wrong_every in (0, 2, 3):
            drafted, num_steps = await seen(sampling, monkeypatch, num_drafts, wrong_every)
            assert drafted == plain, (num_drafts, wrong_every)
            if len(ids) > 2 * len(LIST) and not wrong_every:
                assert num_steps < num_plain_steps, "no draft was accepted, so this shows nothing"


@pytest.mark.parametrize(("max_tokens", "finish"), [(52, "stop"), (50, "stop"), (49, "length")])
async def test_a_stop_in_an_accepted_run_comes_before_the_length_and_hides_what_follows(
    max_tokens: int, finish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right values, written down."""
    sampling = Sampling(max_tokens=max_tokens, stop=(STOP,), num_logprobs=0)
    for num_drafts in (0, 8):
        found, _ = await seen(sampling, monkeypatch, num_drafts)
        num = min(max_tokens, 50)
        text, stop = (ANSWER[:11], STOP) if finish == "stop" else (ANSWER[:49], None)
        assert found == (text, list(ANSWER[:num].encode()), num, finish, stop)

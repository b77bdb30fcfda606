"""What the real model makes of prompts equals transformers in fp32: log-probabilities, ranks, pooled hidden states; and
it is the same to the last bit alone, in a batch, in chunks, and where beginnings are cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from inferloop.core.request import Sampling
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.compute.torch.weights import ModelWeights
from inferloop.engine.schedule.sequence import SequenceSpec, SequenceUpdate
from inferloop.models.resolve import ModelFiles

SCORE = Sampling(max_tokens=0, num_prompt_logprobs=2)
POOL = Sampling(max_tokens=0)
Ask = Callable[..., list[SequenceUpdate]]
Prompts = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def runner(embedded_model: ModelFiles, weights: ModelWeights) -> TorchRunner:
    return TorchRunner(embedded_model.header, weights, TorchConfig(dtype="fp32", deterministic=True, num_blocks=256))


@pytest.fixture(scope="module")
def ask(runner: TorchRunner, drive: Callable[..., Any]) -> Ask:
    """ask(prompts, pool=...): the one update of each."""

    def run(
        prompts: Sequence[tuple[int, ...]], *, pool: bool, budget: int = 256, at_once: int = 8
    ) -> list[SequenceUpdate]:
        specs = [SequenceSpec(str(i), prompt, POOL if pool else SCORE, pool=pool) for i, prompt in enumerate(prompts)]
        updates, _ = drive(runner, specs, max_step_tokens=budget, max_sequences=at_once)
        return [update for (update,) in updates]

    return run


def some(prompts: Prompts, full: bool) -> Prompts:
    chosen = prompts if full else prompts[::4]
    return [*chosen, chosen[0], chosen[-1][: len(chosen[-1]) // 2] + chosen[0]]


def test_log_probabilities(ask: Ask, twin: Any, prompts: Prompts, full: bool) -> None:
    asked = some(prompts, full)
    told = [update.prompt_logprobs for update in ask(asked, pool=False)]
    for prompt, scores in zip(asked, told, strict=True):
        assert scores is not None and len(scores) == len(prompt) - 1
        with torch.inference_mode():
            table = torch.log_softmax(twin(torch.tensor([prompt])).logits[0].double(), -1)
        for i, score in enumerate(scores):
            expected = float(table[i, prompt[i + 1]])
            assert score.chosen == pytest.approx(expected, abs=2e-3)
            best = table[i].topk(2)
            assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=2e-3)
            num_above, num_near = ((table[i] > expected + e).sum() for e in (2e-3, -2e-3))
            assert score.rank is not None and num_above < score.rank <= num_near
    for budget, at_once in ((64, 1), (23, 3)):
        again = [update.prompt_logprobs for update in ask(asked, pool=False, budget=budget, at_once=at_once)]
        assert again == told


def test_pooled_hidden_states(ask: Ask, twin: Any, prompts: Prompts, full: bool) -> None:
    asked = some(prompts, full)
    told = [update.pooled for update in ask(asked, pool=True)]
    for prompt, pooled in zip(asked, told, strict=True):
        with torch.inference_mode():
            mean = twin.model(torch.tensor([prompt])).last_hidden_state[0].double().mean(0).numpy()
        assert pooled is not None
        np.testing.assert_allclose(pooled / len(prompt), mean, atol=1e-3 * float(np.abs(mean).max()))
    for budget, at_once in ((64, 1), (23, 3)):
        for first, update in zip(told, ask(asked, pool=True, budget=budget, at_once=at_once), strict=True):
            assert first is not None and update.pooled is not None
            np.testing.assert_array_equal(first.astype(np.float32), update.pooled.astype(np.float32))

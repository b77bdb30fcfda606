"""Log-probabilities of a prompt and sums of its hidden states equal a plain forward, whatever the engine does: chunks,
cached beginnings, neighbours, preemption, aborts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from inferloop.core.errors import ContextLengthError
from inferloop.core.request import Sampling
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec, SequenceUpdate
from inferloop.engine.schedule.step import StepPlan, TokenLogprob
from inferloop.models.resolve import open_files

VOCAB, CONTEXT, BLOCK = 128, 160, 8
SCORE = Sampling(temperature=0.0, max_tokens=1, num_prompt_logprobs=3)
RNG = np.random.default_rng(7)
PROMPT = tuple(RNG.integers(0, VOCAB, 100).tolist())
HALF = PROMPT[:53] + tuple(RNG.integers(0, VOCAB, 40).tolist())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else 0.06))
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return path, model


@dataclass
class Engine:
    """A scheduler and a runner, driven by hand."""

    path: Path
    num_blocks: int = 64
    budget: int = 256
    max_sequences: int = 8
    updates: dict[str, list[SequenceUpdate]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = TorchConfig(dtype="fp32", deterministic=True, num_blocks=self.num_blocks, block_size=BLOCK)
        self.runner = TorchRunner.load(open_files("tiny", self.path), config)
        self.scheduler = Scheduler(
            ScheduleConfig(
                vocab_size=VOCAB,
                context_length=CONTEXT,
                block_size=BLOCK,
                num_blocks=self.num_blocks,
                max_step_tokens=self.budget,
                max_sequences=self.max_sequences,
            )
        )

    def add(self, name: str, prompt: tuple[int, ...], sampling: Sampling = SCORE, **more: Any) -> None:
        self.updates[name] = []
        self.scheduler.add(SequenceSpec(name, prompt, sampling, **more))

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.plans.append(plan)
        self.runner.submit(plan)
        for update in self.scheduler.commit(plan, self.runner.wait()):
            self.updates[update.request_id].append(update)
        self.scheduler.check()

    def drain(self) -> None:
        while self.scheduler.request_ids:
            self.step()

    def scores(self, name: str) -> tuple[TokenLogprob, ...]:
        """Told with the first update, and never again."""
        first, *rest = [update.prompt_logprobs for update in self.updates[name]]
        assert first is not None and all(values is None for values in rest)
        return first


def expected(model: Any, prompt: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return torch.log_softmax(logits.double(), -1)


def check(model: Any, prompt: tuple[int, ...], scores: tuple[TokenLogprob, ...], num_top: int = 3) -> None:
    table = expected(model, prompt)
    assert len(scores) == len(prompt) - 1
    for i, score in enumerate(scores):
        assert score.chosen == pytest.approx(float(table[i, prompt[i + 1]]), abs=2e-4)
        assert score.rank == int((table[i] > table[i, prompt[i + 1]]).sum()) + 1
        best = table[i].topk(num_top)
        assert [token for token, _ in score.top] == best.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=2e-4)


@pytest.fixture(scope="module")
def cold(model: tuple[Path, Any]) -> tuple[TokenLogprob, ...]:
    engine = Engine(model[0])
    engine.add("a", PROMPT)
    engine.drain()
    check(model[1], PROMPT, engine.scores("a"))
    return engine.scores("a")


@pytest.mark.parametrize("budget", [1, 7, 16, 99, 100])
def test_in_any_chunks(budget: int, model: tuple[Path, Any], cold: tuple[TokenLogprob, ...]) -> None:
    engine = Engine(model[0], budget=budget)
    engine.add("a", PROMPT)
    engine.drain()
    assert engine.scores("a") == cold


def test_what_the_cache_knows_is_computed_for_its_logits_and_still_published(
    model: tuple[Path, Any], cold: tuple[TokenLogprob, ...]
) -> None:
    engine = Engine(model[0])
    for name in ("cold", "again"):
        engine.add(name, PROMPT)
        engine.drain()
        assert engine.scores(name) == cold
        assert engine.updates[name][0].num_cached_tokens == 0
    engine.add("half", HALF)
    engine.drain()
    check(model[1], HALF, engine.scores("half"))
    assert engine.scores("half")[: 53 - 1] == cold[: 53 - 1]
    engine.add("plain", HALF, Sampling(temperature=0.0, max_tokens=1))
    engine.drain()
    assert engine.updates["plain"][0].num_cached_tokens >= len(HALF) // BLOCK * BLOCK - BLOCK
    assert engine.updates["plain"][0].token_ids == engine.updates["half"][0].token_ids
    assert engine.scheduler.num_prefix_queries == len(HALF), "those that may not use the cache do not ask it"


def test_beside_neighbours_that_share_the_beginning(model: tuple[Path, Any], cold: tuple[TokenLogprob, ...]) -> None:
    engine = Engine(model[0], budget=24)
    engine.add("x", PROMPT[:30], Sampling(temperature=0.7, seed=5, max_tokens=9))
    engine.add("a", PROMPT)
    engine.add("half", HALF)
    engine.add("b", PROMPT, Sampling(temperature=0.0, max_tokens=3, num_prompt_logprobs=0, num_logprobs=2))
    engine.drain()
    assert engine.scores("a") == cold
    check(model[1], HALF, engine.scores("half"))
    assert [score.chosen for score in engine.scores("b")] == [score.chosen for score in cold]
    assert all(score.top == () for score in engine.scores("b"))


def test_preempted_in_the_middle_of_its_prompt(model: tuple[Path, Any], cold: tuple[TokenLogprob, ...]) -> None:
    """What it has found out before is not computed again: the cache may serve that much."""
    engine = Engine(model[0], num_blocks=17, budget=8)
    engine.add("first", PROMPT[:3], Sampling(temperature=0.0, max_tokens=36, ignore_eos=True))
    for _ in range(20):
        engine.step()
    engine.add("a", PROMPT, Sampling(temperature=0.0, max_tokens=4, num_prompt_logprobs=3))
    engine.drain()
    assert engine.updates["a"][0].num_preemptions > 0
    assert engine.scores("a") == cold
    rows = [len(plan.prompt_rows.flat) for plan in engine.plans if plan.prompt_rows is not None]
    assert sum(rows) == len(PROMPT) - 1


def test_preempted_while_it_decodes(model: tuple[Path, Any], cold: tuple[TokenLogprob, ...]) -> None:
    """The values were told already; resuming tells nothing again and may start from the cache."""
    alone = Engine(model[0])
    sampling = Sampling(temperature=0.0, max_tokens=30, num_prompt_logprobs=3, ignore_eos=True)
    alone.add("a", PROMPT, sampling)
    alone.drain()
    engine = Engine(model[0], num_blocks=18)
    engine.add("first", PROMPT[:3], Sampling(temperature=0.0, max_tokens=60, ignore_eos=True))
    engine.step()
    engine.add("a", PROMPT, sampling)
    engine.drain()
    assert engine.updates["a"][0].num_preemptions == 0
    assert engine.updates["a"][-1].num_preemptions > 0
    assert engine.scores("a") == cold
    tokens = [[t for update in e.updates["a"] for t in update.token_ids] for e in (alone, engine)]
    assert tokens[0] == tokens[1]


def test_sampling_parameters_do_not_touch_them(model: tuple[Path, Any], cold: tuple[TokenLogprob, ...]) -> None:
    engine = Engine(model[0])
    odd = Sampling(
        temperature=1.7,
        seed=1,
        max_tokens=2,
        logit_bias=tuple((token, -100.0) for token in PROMPT[1:20]),
        repetition_penalty=3.0,
        num_prompt_logprobs=3,
    )
    engine.add("a", PROMPT, odd)
    engine.drain()
    assert engine.scores("a") == cold


def test_scoring_alone_generates_nothing(model: tuple[Path, Any], cold: tuple[TokenLogprob, ...]) -> None:
    engine = Engine(model[0], budget=33)
    engine.add("a", PROMPT, Sampling(max_tokens=0, num_prompt_logprobs=3))
    engine.add("one", PROMPT[:1], Sampling(max_tokens=0, num_prompt_logprobs=3))
    engine.add("nothing", PROMPT[:40], Sampling(max_tokens=0))
    engine.drain()
    for name in ("a", "one", "nothing"):
        (update,) = engine.updates[name]
        assert (update.token_ids, update.finish_reason) == ((), "length")
    assert engine.scores("a") == cold
    assert engine.scores("one") == ()
    assert engine.updates["nothing"][0].prompt_logprobs is None


def test_abort_half_way_leaves_nothing(model: tuple[Path, Any], cold: tuple[TokenLogprob, ...]) -> None:
    engine = Engine(model[0], budget=16)
    engine.add("a", PROMPT)
    engine.add("pool", PROMPT, Sampling(max_tokens=0), pool=True)
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None and plan.prompt_rows is not None
    engine.runner.submit(plan)
    assert engine.scheduler.abort("a") and engine.scheduler.abort("pool")
    assert engine.scheduler.commit(plan, engine.runner.wait()) == []
    engine.scheduler.check()
    assert engine.scheduler.num_blocks_used == 0
    engine.add("b", PROMPT)
    engine.drain()
    assert engine.scores("b") == cold


def mean_of(engine: Engine, name: str, num: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    (update,) = engine.updates[name]
    assert update.pooled is not None and update.finish_reason == "stop" and update.token_ids == ()
    return update.pooled / num


def expected_mean(model: Any, prompt: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
    mean: np.ndarray[Any, np.dtype[np.float64]] = hidden.double().mean(0).numpy()
    return mean


@pytest.mark.parametrize("budget", [1, 7, 64, 256])
def test_pooled_in_any_chunks_beside_anybody(budget: int, model: tuple[Path, Any]) -> None:
    pooled = Sampling(max_tokens=0)
    alone = Engine(model[0])
    alone.add("a", PROMPT, pooled, pool=True)
    alone.drain()
    np.testing.assert_allclose(mean_of(alone, "a", len(PROMPT)), expected_mean(model[1], PROMPT), atol=1e-5)
    engine = Engine(model[0], budget=budget)
    engine.add("chat", PROMPT[:60], Sampling(temperature=0.0, max_tokens=5))
    engine.add("a", PROMPT, pooled, pool=True)
    engine.add("half", HALF, pooled, pool=True)
    engine.add("score", HALF)
    engine.drain()
    np.testing.assert_allclose(mean_of(engine, "a", len(PROMPT)), mean_of(alone, "a", len(PROMPT)), rtol=0, atol=1e-12)
    np.testing.assert_allclose(mean_of(engine, "half", len(HALF)), expected_mean(model[1], HALF), atol=1e-5)
    check(model[1], HALF, engine.scores("score"))
    engine.add("after", PROMPT, Sampling(temperature=0.0, max_tokens=1))
    engine.drain()
    assert engine.updates["after"][0].num_cached_tokens >= 96, "what was pooled is known to others"


def test_pooled_again_from_the_start_after_preemption(model: tuple[Path, Any]) -> None:
    engine = Engine(model[0], num_blocks=17, budget=8)
    engine.add("first", PROMPT[:3], Sampling(temperature=0.0, max_tokens=36, ignore_eos=True))
    for _ in range(20):
        engine.step()
    engine.add("a", PROMPT, Sampling(max_tokens=0), pool=True)
    engine.drain()
    np.testing.assert_allclose(mean_of(engine, "a", len(PROMPT)), expected_mean(model[1], PROMPT), atol=1e-5)
    assert engine.updates["a"][0].num_preemptions > 0


@pytest.mark.parametrize("num_blocks", [16, 64], ids=["memory", "context"])
def test_a_prompt_that_fills_everything_is_the_longest(num_blocks: int, model: tuple[Path, Any]) -> None:
    make: Callable[[int], tuple[int, ...]] = lambda num: tuple(PROMPT[i % 100] for i in range(num))  # noqa: E731
    limit = min(CONTEXT, num_blocks * BLOCK)
    engine = Engine(model[0], num_blocks=num_blocks)
    for name, num in (("a", limit - 1), ("b", limit)):
        engine.add(name, make(num), Sampling(max_tokens=0), pool=True)
        engine.drain()
        np.testing.assert_allclose(mean_of(engine, name, num), expected_mean(model[1], make(num)), atol=1e-5)
    with pytest.raises(ContextLengthError, match=f"{limit + 1} tokens exceeds"):
        engine.add("c", make(limit + 1), Sampling(max_tokens=0), pool=True)

"""What the oracle tests share: the real model in fp32, its twin in transformers, prompts, and a plain driver."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from inferloop.core.request import Sampling
from inferloop.engine.compute.runner import Runner
from inferloop.engine.compute.stored import half_split, read_tensor
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.compute.torch.weights import ModelWeights, load_weights
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec, SequenceUpdate
from inferloop.engine.text.tokenizer import load_tokenizer
from inferloop.models.resolve import ModelFiles

_log = logging.getLogger("oracle")

NUM_NEW = 64
GREEDY = Sampling(temperature=0.0, max_tokens=NUM_NEW)
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers.",
    "Translate 'good morning' into Spanish.",
    "Explain what a hash table is in two sentences.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is 12 times 12?",
    "Is a tomato a fruit? Answer yes or no.",
    "Name a colour.",
)
CONTINUATIONS = (
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    '{"name": "Ada", "born": ',
    "Zürich, São Paulo, 東京 and Київ are",
    "1, 2, 4, 8, 16,",
    "SELECT name FROM users WHERE",
    "A",
    "Water boils at one hundred degrees. " * 9 + "It freezes at",
    "In the beginning there was a small village by the river, and in it lived a baker, a smith and a teacher. " * 7,
)


@dataclass(frozen=True)
class Options:
    """How an engine is put together for one run."""

    deterministic: bool = True
    dtype: str = "fp32"
    max_step_tokens: int = 256
    max_sequences: int = 8
    num_blocks: int = 512


Generate = Callable[..., list[list[int]]]
Drive = Callable[..., tuple[list[list[SequenceUpdate]], Scheduler]]


@pytest.fixture(scope="session")
def prompts(embedded_model: ModelFiles) -> list[tuple[int, ...]]:
    """Twenty: ten chats and ten plain texts, from 1 to more than 150 tokens."""
    tokenizer = load_tokenizer(embedded_model)
    chats = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    texts = [text for pair in zip(chats, CONTINUATIONS, strict=True) for text in pair]
    return [tuple(tokenizer.encode(text, allow_special=True)) for text in texts]


@pytest.fixture(scope="session")
def twin(embedded_model: ModelFiles) -> Any:
    """transformers' Llama with the very same dequantized weights, fp32."""
    header = embedded_model.header
    shape = header.shape
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_length,
        rms_norm_eps=header.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": header.rope.theta},
        tie_word_embeddings=shape.tied_embeddings,
        bos_token_id=header.bos_token_id,
        eos_token_id=list(header.eos_token_ids),
        pad_token_id=header.eos_token_ids[0],
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = {
        name: torch.from_numpy(half_split(read_tensor(info), info, shape.head_dim))
        for name, info in header.tensors.items()
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model


@pytest.fixture(scope="session")
def reference(twin: Any, prompts: list[tuple[int, ...]], embedded_model: ModelFiles) -> list[list[int]]:
    """Greedy continuations by transformers, with its own KV cache and padding, in one batch."""
    eos = embedded_model.header.eos_token_ids
    width = max(map(len, prompts))
    ids = torch.tensor([[eos[0]] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = twin.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False)
    answers = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        answers.append(row[:end])
    return answers


@pytest.fixture(scope="session")
def weights(embedded_model: ModelFiles) -> ModelWeights:
    """The real model's, fp32 on CPU."""
    return load_weights(embedded_model.header, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="session")
def drive() -> Drive:
    """drive(runner, specs, **schedule) -> (the updates of each, the scheduler): all handed in at once, until all have
    ended. `schedule`: fields of ScheduleConfig other than those which the runner tells."""

    def run(
        runner: Runner, specs: Sequence[SequenceSpec], **schedule: Any
    ) -> tuple[list[list[SequenceUpdate]], Scheduler]:
        info = runner.info
        config = ScheduleConfig(
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            **schedule,
        )
        scheduler = Scheduler(config)
        updates: dict[str, list[SequenceUpdate]] = {spec.request_id: [] for spec in specs}
        for spec in specs:
            scheduler.add(spec)
        while scheduler.request_ids:
            plan = scheduler.schedule()
            assert plan is not None
            runner.submit(plan)
            for update in scheduler.commit(plan, runner.wait()):
                updates[update.request_id].append(update)
        scheduler.check()
        return list(updates.values()), scheduler

    return run


@pytest.fixture(scope="session")
def generate(embedded_model: ModelFiles, weights: ModelWeights, drive: Drive) -> Generate:
    """generate(prompts, options, sampling=...) -> tokens of each; sampling may be one for all or one each."""
    header = embedded_model.header

    def run(
        prompts: Sequence[tuple[int, ...]],
        options: Options,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        preempted: list[int] | None = None,
        cached: dict[int, int] | None = None,
    ) -> list[list[int]]:
        config = TorchConfig(dtype=options.dtype, deterministic=options.deterministic, num_blocks=options.num_blocks)
        device = torch.device("cpu")
        is_fp32 = options.dtype == "fp32"
        loaded = weights if is_fp32 else load_weights(header, dtype=config.torch_dtype, device=device)
        runner = TorchRunner(header, loaded, config)
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        specs = [
            SequenceSpec(str(i), prompt, wanted, seed=(wanted.seed or 0) % 2**64)
            for i, (prompt, wanted) in enumerate(zip(prompts, each, strict=True))
        ]
        limits = {"max_step_tokens": options.max_step_tokens, "max_sequences": options.max_sequences}
        updates, scheduler = drive(runner, specs, eos_token_ids=header.eos_token_ids, **limits)
        if cached is not None:
            cached.update((i, come[-1].num_cached_tokens) for i, come in enumerate(updates))
        if preempted is not None:
            preempted.append(scheduler.num_preemptions)
        return [[token for update in come for token in update.token_ids] for come in updates]

    return run


@pytest.fixture(scope="session")
def options() -> type[Options]:
    return Options


@dataclass(frozen=True)
class Divergence:
    """Where an answer first leaves the expected one, and how near a tie that was by the reference's own logits."""

    prompt: int
    position: int
    got: int | None
    expected: int | None
    margin: float
    """By how much its best logit exceeds the runner-up."""
    loss: float
    """By how much it exceeds the lower of the two tokens' logits; infinite where one of the answers has ended."""

    def __str__(self) -> str:
        where = f"prompt {self.prompt}, answer token {self.position}: {self.got} instead of {self.expected}"
        return f"{where}; top-2 margin {self.margin:.2e}, chosen {self.loss:.2e} below the best logit"


def divergence(
    twin: Any, prompt_number: int, prompt: tuple[int, ...], got: list[int], expected: list[int]
) -> Divergence:
    pairs = list(itertools.zip_longest(got, expected))
    position = next(n for n, (ours, theirs) in enumerate(pairs) if ours != theirs)
    with torch.inference_mode():
        logits = twin(torch.tensor([[*prompt, *expected[:position]]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    lowest = min(float("-inf") if token is None else float(logits[token]) for token in pairs[position])
    return Divergence(prompt_number, position, *pairs[position], best - second, best - lowest)


@pytest.fixture(scope="session")
def assert_same(twin: Any, assert_same_as: Callable[..., None]) -> Callable[..., None]:
    """`assert_same_as` the real model's twin."""
    return functools.partial(assert_same_as, twin)


@pytest.fixture(scope="session")
def assert_same_as() -> Callable[..., None]:
    """assert_same_as(twin, prompts, got, expected, near_tie): the answers are equal, or leave the expected ones where
    the reference itself all but hesitates, both tokens within `near_tie` of its best logit. All of those are logged."""

    def check(
        twin: Any,
        prompts: Sequence[tuple[int, ...]],
        got: Sequence[list[int]],
        expected: Sequence[list[int]],
        near_tie: float,
    ) -> None:
        assert len(got) == len(expected) == len(prompts)
        triples = enumerate(zip(prompts, got, expected, strict=True))
        found = [divergence(twin, i, prompt, ours, theirs) for i, (prompt, ours, theirs) in triples if ours != theirs]
        for one in found:
            _log.warning("%s", one)
        wrong = [str(one) for one in found if one.loss > near_tie]
        assert not wrong, f"no near ties (within {near_tie}):\n" + "\n".join(wrong)

    return check

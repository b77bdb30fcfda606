"""Gemma 3 270M, where somebody has fetched it (`inferloop models fetch gemma3-270m`): its facts, its vocabulary, and
its greedy text against transformers, which computes in fp32 with the weights of the same GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from inferloop.catalog.models import known_models
from inferloop.core.request import Sampling
from inferloop.engine.compute.stored import read_tensor
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.text.tokenizer import Tokenizer, load_tokenizer
from inferloop.models.cache import cached_path
from inferloop.models.resolve import ModelFiles, open_files

Prompts = list[tuple[int, ...]]
KNOWN = known_models()["gemma3-270m"]
NUM_NEW = 32
TEXTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    '{"name": "Ada", "born": ',
    "Zürich, São Paulo, 東京 and Київ are",
    "1, 2, 4, 8, 16,",
    "SELECT name FROM users WHERE",
    "Water boils at one hundred degrees. " * 9 + "It freezes at",
    "<start_of_turn>user\nName a colour.<end_of_turn>\n<start_of_turn>model\n",
    "In the beginning there was a small village by the river, and in it lived a baker, a smith and a teacher. " * 30,
)
"""The last is longer than the window."""
FP32_TIE = 1e-3


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    cache = os.environ.get("INFERLOOP_CACHE_DIR")
    path = cached_path(KNOWN, Path(cache) if cache else None)
    if path is None:
        pytest.skip("gemma3-270m has not been fetched")
    return open_files(KNOWN.name, path)


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> Tokenizer:
    return load_tokenizer(files)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> Prompts:
    assert tokenizer.bos_token_id is not None
    return [(tokenizer.bos_token_id, *tokenizer.encode(text, allow_special=True)) for text in TEXTS]


@pytest.fixture(scope="module")
def gemma(files: ModelFiles) -> Any:
    """transformers' model, configured by hand: what a GGUF file leaves unsaid is as in the authors' config.json. GGUF
    keeps the norms' gains with 1 added."""
    shape = files.header.shape
    config = transformers.Gemma3TextConfig(
        vocab_size=shape.vocab_size,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32768,
        rms_norm_eps=files.header.norm_eps,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    state = {
        name: torch.from_numpy(read_tensor(info) - np.float32("norm" in name))
        for name, info in files.header.tensors.items()
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def reference(gemma: Any, prompts: Prompts) -> list[list[int]]:
    gemma.generation_config.eos_token_id = gemma.generation_config.pad_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = gemma.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def test_the_catalogues_facts_agree_with_the_file(files: ModelFiles) -> None:
    header = files.header
    assert KNOWN.num_params == sum(int(np.prod(info.shape)) for info in header.tensors.values())
    assert (KNOWN.context_length, KNOWN.family) == (header.shape.context_length, header.shape.architecture)
    assert (KNOWN.stored_precision, KNOWN.license.lower()) == (header.stored_precision, header.license)


def test_texts_come_back_from_their_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 262_144
    for text in (*TEXTS, " two  spaces\tand\n\n\nlines ", "🙂👩‍👩‍👧‍👦 \u0378"):
        assert tokenizer.decode(tokenizer.encode(text, allow_special=False)) == text


def test_ids_are_those_of_transformers(files: ModelFiles, tokenizer: Tokenizer) -> None:
    """Which reads the same vocabulary in its own way."""
    theirs = transformers.AutoTokenizer.from_pretrained(files.path.parent, gguf_file=files.path.name)
    for text in (*TEXTS, " two  spaces\tand\n\n\nlines ", "a▁b", "1234567 12,345.67", "ÀÉÎ ﬁ Ⅳ ½", "🙂👩‍👩‍👧‍👦 \u0378"):
        assert tokenizer.encode(text, allow_special=True) == theirs(text, add_special_tokens=False)["input_ids"]


def generate(runner: Any, prompts: Prompts, drive: Callable[..., Any], **schedule: Any) -> list[list[int]]:
    wanted = Sampling(temperature=0.0, max_tokens=NUM_NEW)
    specs = [SequenceSpec(str(i), prompt, wanted, seed=i) for i, prompt in enumerate(prompts)]
    updates, _ = drive(runner, specs, **schedule)
    return [[token for update in come for token in update.token_ids] for come in updates]


@pytest.mark.parametrize("chunk", [256, 64])
def test_greedy_text_is_that_of_transformers(
    chunk: int,
    files: ModelFiles,
    prompts: Prompts,
    reference: list[list[int]],
    drive: Callable[..., Any],
    gemma: Any,
    assert_same_as: Callable[..., None],
) -> None:
    runner = TorchRunner.load(files, TorchConfig(dtype="fp32", num_blocks=512))
    got = generate(runner, prompts, drive, max_step_tokens=chunk)
    assert_same_as(gemma, prompts, got, reference, FP32_TIE)
    print(f"{sum(ours == theirs for ours, theirs in zip(got, reference, strict=True))} of {len(got)} are equal")


NEAR_TIES = {"fp32": 0.05, "bf16": 0.15, "stored": 0.2, "int8": 0.3}
"""How far below the best logit of fp32 a class may choose, several times what was seen. Even fp32 has its keys and
values in bf16."""


@pytest.mark.parametrize("weights", NEAR_TIES)
def test_native_answers_leave_transformers_at_near_ties_only(
    weights: Any,
    files: ModelFiles,
    prompts: Prompts,
    reference: list[list[int]],
    drive: Callable[..., Any],
    gemma: Any,
    assert_same_as: Callable[..., None],
    tmp_path: Path,
) -> None:
    pytest.importorskip("inferloop.engine.compute.native._native")
    from inferloop.engine.compute.native.config import NativeConfig
    from inferloop.engine.compute.native.runner import NativeRunner

    runner = NativeRunner.load(files, NativeConfig(weights=weights, num_blocks=512), cache_dir=tmp_path)
    got = generate(runner, prompts, drive)
    num_equal = sum(ours == theirs for ours, theirs in zip(got, reference, strict=True))
    print(f"{weights}: {num_equal} of {len(got)} are equal")
    assert_same_as(gemma, prompts, got, reference, NEAR_TIES[weights])

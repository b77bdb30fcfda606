"""What is an adapter of a model, and what is refused by name before a number of it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.adapters import shapes_of, write_adapter

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import ModelShape
from inferloop.models.adapters.read import MODULES, read_adapter
from inferloop.models.headers import ModelHeader, RopeSpec

SHAPE = ModelShape(
    architecture="llama",
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    vocab_size=64,
    context_length=128,
    tied_embeddings=True,
)
MODEL = ModelHeader(
    shape=SHAPE,
    rope=RopeSpec(theta=10000.0, dim=8),
    norm_eps=1e-5,
    tensors={},
    stored_precision="fp32",
    bos_token_id=None,
    eos_token_ids=(),
    chat_template=None,
)
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def read(path: Path, max_rank: int = 16) -> Any:
    return read_adapter(path, MODEL, max_rank=max_rank)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def test_every_pair_has_its_rank_and_strength(tmp_path: Path) -> None:
    found = read(write_adapter(tmp_path, MODEL, rank=4, alpha=6))
    assert set(found.pairs) == set(shapes_of(MODEL, MODULES)) and len(found.pairs) == 3 * 7
    assert {(pair.rank, pair.scaling) for pair in found.pairs.values()} == {(4, 1.5)}
    stabilized = read(write_adapter(tmp_path, MODEL, rank=4, alpha=6, use_rslora=True))
    assert {pair.scaling for pair in stabilized.pairs.values()} == {3.0}


def test_patterns_name_modules_by_their_ends_and_the_first_counts(tmp_path: Path) -> None:
    own = {"1.mlp.up_proj": 2, "up_proj": 8}
    alphas = {"^model.layers.0.mlp.up_proj": 1, "k_proj": 12, "roj": 99}
    found = read(write_adapter(tmp_path, MODEL, rank=4, alpha=4, ranks=own, alpha_pattern=alphas))
    assert [found.pairs[f"model.layers.{i}.mlp.up_proj"].rank for i in range(3)] == [8, 2, 8]
    assert [found.pairs[f"model.layers.{i}.mlp.up_proj"].scaling for i in range(3)] == [1 / 8, 2, 0.5]
    assert found.pairs["model.layers.2.self_attn.k_proj"].scaling == 3
    assert found.pairs["model.layers.2.self_attn.q_proj"].scaling == 1
    assert found.rank == 8


def test_some_layers_alone_where_the_config_says_so(tmp_path: Path) -> None:
    gone = [f"base_model.model.{m}.lora_{s}.weight" for m in shapes_of(MODEL, MODULES) if ".1." in m for s in "AB"]
    with pytest.raises(ModelFileError, match=r"layers\.1\.\S+ is not adapted, although the config means all layers"):
        read(write_adapter(tmp_path, MODEL, drop=gone))
    found = read(write_adapter(tmp_path, MODEL, drop=gone, layers_to_transform=[0, 2]))
    assert len(found.pairs) == 2 * 7
    assert len(read(write_adapter(tmp_path, MODEL, drop=gone, target_modules=".*(0|2).*_proj")).pairs) == 14
    with pytest.raises(ModelFileError, match="although the config means all layers"):
        read(write_adapter(tmp_path, MODEL, drop=gone, target_modules="all-linear"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora is True: DoRA is not supported"),
    "bias": ({"bias": "lora_only"}, "bias is 'lora_only': adapted biases"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*whole modules"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, "fan_in_fan_out is True: transposed"),
    "token embeddings": ({"trainable_token_indices": [1]}, "trainable_token_indices is .*embeddings"),
    "experts": ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters is .*experts"),
    "layer_replication": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    "a key of the future": ({"use_quantum": "yes"}, "use_quantum is 'yes': this key is not known here"),
    "activated LoRA": ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
    "an adapted bias": ({"lora_bias": True}, "lora_bias"),
    "another kind": ({"peft_type": "IA3"}, "peft_type is 'IA3', only LORA"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the base"),
    "an expression as pattern": ({"alpha_pattern": {"(a+)+$": 3}}, r"alpha_pattern has '\(a\+\)\+\$', which is no"),
    "very many patterns": ({"rank_pattern": {f"m{i}": 1 for i in range(5000)}}, "rank_pattern has 5000 entries"),
    "no rank": ({"r": 0}, "r is 0, not a whole number above 0"),
    "a rank that is not that of the file": ({"r": 5}, r"has shape \(4, \d+\), model and config imply \(5, \d+\)"),
    "a strength without bound": ({"lora_alpha": 10**400}, "lora_alpha is 10+, not a finite number"),
    "no strength": ({"lora_alpha": "much"}, "lora_alpha is 'much', not a finite number"),
    "targets without tensors": ({"target_modules": [*MODULES, "w9"]}, "config targets 'w9', of which there is no"),
    "no targets at all": ({"target_modules": [1]}, "target_modules is not a list of names"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_computed_is_refused_with_its_key(what: str, tmp_path: Path) -> None:
    config, message = REFUSED[what]
    with pytest.raises(ModelFileError, match=message):
        read(write_adapter(tmp_path, MODEL, **config))


TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "the embedding": (
        {"add": {"base_model.model.model.embed_tokens.lora_embedding_A": floats(4, 64)}},
        "embed_tokens.lora_embedding_A adapts an embedding, which is not supported",
    ),
    "the head": (
        {"add": {"base_model.model.lm_head.lora_A.weight": floats(4, 32)}},
        "lm_head.lora_A.weight adapts the head",
    ),
    "magnitudes": ({"add": {FIRST + ".lora_magnitude_vector": floats(32)}}, "belongs to DoRA"),
    "a whole module": ({"add": {"base_model.model.score.modules_to_save.weight": floats(2, 32)}}, "saved as a whole"),
    "a bias": ({"add": {FIRST + ".lora_B.bias": floats(32)}}, "is an adapted bias"),
    "an expert": (
        {"add": {"base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight": floats(4, 32)}},
        "adapts an expert",
    ),
    "a norm": ({"add": {"base_model.model.model.norm.lora_A.weight": floats(4, 32)}}, "is none that can be adapted"),
    "a layer too many": (
        {"add": {"base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight": floats(4, 32)}},
        "adapts layer 3, the model has 3 layers",
    ),
    "half a pair": ({"drop": [FIRST + ".lora_B.weight"]}, "q_proj has a lora_A and no lora_B"),
    "the other half": ({"drop": [FIRST + ".lora_A.weight"]}, "q_proj has a lora_B and no lora_A"),
    "another width": ({"add": {FIRST + ".lora_A.weight": floats(4, 33)}}, r"shape \(4, 33\), .*imply \(4, 32\)"),
    "another height": ({"add": {FIRST + ".lora_B.weight": floats(31, 4)}}, r"shape \(31, 4\), .*imply \(32, 4\)"),
    "whole numbers": ({"add": {FIRST + ".lora_A.weight": np.ones((4, 32), np.int8)}}, "is int8; adapters are fp32"),
    "two names for one": (
        {"add": {FIRST.replace("base_model.model.", "") + ".lora_A.weight": floats(4, 32)}},
        "has two lora_A, under different names",
    ),
    "a rank above the limit": ({"rank": 17}, "has rank 17, this server takes up to 16"),
    "a rank of one module above the limit": ({"ranks": {"up_proj": 17}}, "up_proj has rank 17, this server takes"),
    "nothing": ({"modules": ()}, "holds no pair"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_are_no_pair_of_this_model_are_refused_by_name(what: str, tmp_path: Path) -> None:
    written, message = TENSORS[what]
    with pytest.raises(ModelFileError, match=message):
        read(write_adapter(tmp_path, MODEL, **written))


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"not a PEFT adapter directory, it has no adapter_config\.json"):
        read(tmp_path)
    path = write_adapter(tmp_path, MODEL)
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="truncated or damaged"):
        read(path)
    weights.rename(path / "adapter_model.bin")
    with pytest.raises(ModelFileError, match=r"has no adapter_model.safetensors, and adapter_model.bin is not read"):
        read(path)
    (path / "adapter_config.json").write_text(json.dumps({"x": "y" * (1 << 20)}))
    with pytest.raises(ModelFileError, match="is longer than 1048576 bytes"):
        read(path)

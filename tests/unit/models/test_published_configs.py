"""config.json as the repositories of well-known models have it, against what transformers makes of it."""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from inferloop.engine.compute.rope import inverse_frequencies
from inferloop.models.headers.config_json import ConfigFacts, read_config
from inferloop.models.headers.structure import RopeSpec

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def config(
    kind: str, hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "hidden_act": "silu",
        **more,
    }


def gemma(
    kind: str, hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    said = config(kind, hidden, ffn, layers, heads, kv, vocab, **more)
    del said["hidden_act"]
    return {**said, "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "rms_norm_eps": 1e-6}


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-2-7b-hf": config(
        "llama", 4096, 11008, 32, 32, 32, 32000, bos_token_id=1, eos_token_id=2, max_position_embeddings=4096,
        pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=None, tie_word_embeddings=False,
    ),
    "TinyLlama-1.1B-Chat-v1.0": config(
        "llama", 2048, 5632, 22, 32, 4, 32000, bos_token_id=1, eos_token_id=2, max_position_embeddings=2048,
        attention_bias=False, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "Llama-3.1-8B-Instruct": config(
        "llama", 4096, 14336, 32, 32, 8, 128256, bos_token_id=128000, eos_token_id=[128001, 128008, 128009],
        max_position_embeddings=131072, mlp_bias=False, attention_bias=False, rms_norm_eps=1e-5, rope_scaling=LLAMA3,
        rope_theta=500000.0, tie_word_embeddings=False, pretraining_tp=1,
    ),
    "Llama-3.2-1B": config(
        "llama", 2048, 8192, 16, 32, 8, 128256, bos_token_id=128000, eos_token_id=128001, head_dim=64,
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_scaling={**LLAMA3, "factor": 32.0},
        rope_theta=500000.0, tie_word_embeddings=True,
    ),
    "SmolLM2-135M": config(
        "llama", 576, 1536, 30, 9, 3, 49152, bos_token_id=0, eos_token_id=0, is_llama_config=True,
        max_position_embeddings=8192, rms_norm_eps=1e-5, rope_interleaved=False, rope_scaling=None, rope_theta=100000,
        tie_word_embeddings=True,
    ),
    "Mistral-7B-v0.1": config(
        "mistral", 4096, 14336, 32, 32, 8, 32000, bos_token_id=1, eos_token_id=2, max_position_embeddings=32768,
        rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False,
    ),
    "Mistral-7B-Instruct-v0.3": config(
        "mistral", 4096, 14336, 32, 32, 8, 32768, bos_token_id=1, eos_token_id=2, max_position_embeddings=32768,
        rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False,
    ),
    "Mistral-Nemo-Instruct-2407": config(
        "mistral", 5120, 14336, 40, 32, 8, 131072, bos_token_id=1, eos_token_id=2, head_dim=128,
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=None,
        tie_word_embeddings=False,
    ),
    "Mixtral-8x7B-v0.1": config(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, bos_token_id=1, eos_token_id=2, max_position_embeddings=32768,
        num_experts_per_tok=2, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1000000.0,
        router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
    ),
    "Qwen2.5-0.5B-Instruct": config(
        "qwen2", 896, 4864, 24, 14, 2, 151936, bos_token_id=151643, eos_token_id=151645, max_position_embeddings=32768,
        max_window_layers=21, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "Qwen2.5-7B-Instruct, extended": config(
        "qwen2", 3584, 18944, 28, 28, 4, 152064, bos_token_id=151643, eos_token_id=151645,
        max_position_embeddings=32768, max_window_layers=28, rms_norm_eps=1e-6, rope_theta=1000000.0,
        sliding_window=131072, tie_word_embeddings=False,
        use_sliding_window=False,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    ),
    "Qwen3-0.6B": config(
        "qwen3", 1024, 3072, 28, 16, 8, 151936, attention_bias=False, bos_token_id=151643, eos_token_id=151645,
        head_dim=128, max_position_embeddings=40960, max_window_layers=28, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=1000000, sliding_window=None, tie_word_embeddings=True, use_sliding_window=False,
    ),
    "Qwen3-30B-A3B": config(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, attention_bias=False, bos_token_id=151643, eos_token_id=151645,
        decoder_sparse_step=1, head_dim=128, max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[],
        moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, rms_norm_eps=1e-6,
        rope_scaling=None, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False,
        use_sliding_window=False,
    ),
    "gemma-2-2b": gemma(
        "gemma2", 2304, 9216, 26, 8, 4, 256000, attention_bias=False, attn_logit_softcapping=50.0,
        cache_implementation="hybrid", eos_token_id=1, final_logit_softcapping=30.0, head_dim=256,
        max_position_embeddings=8192, query_pre_attn_scalar=256, rope_theta=10000.0, sliding_window=4096,
    ),
    "gemma-2-27b": gemma(
        "gemma2", 4608, 36864, 46, 32, 16, 256000, attn_logit_softcapping=50.0, eos_token_id=1,
        final_logit_softcapping=30.0, head_dim=128, max_position_embeddings=8192, query_pre_attn_scalar=144,
        rope_theta=10000.0, sliding_window=4096, hidden_act="gelu_pytorch_tanh",
    ),
    "gemma-3-1b-it": gemma(
        "gemma3_text", 1152, 6912, 26, 4, 1, 262144, attention_bias=False, attn_logit_softcapping=None,
        cache_implementation="hybrid", eos_token_id=[1, 106], final_logit_softcapping=None, head_dim=256,
        max_position_embeddings=32768, query_pre_attn_scalar=256, rope_local_base_freq=10000, rope_scaling=None,
        rope_theta=1000000, sliding_window=512, sliding_window_pattern=6,
    ),
    "gemma-3-4b-it": {
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
    },
    "gemma-3-27b-it": {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "model_type": "gemma3_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
    },
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def read(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ConfigFacts, Any]:
    """Name, ours, and theirs of the text model."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS[request.param]))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    return request.param, read_config(file), theirs.get_text_config()


def windows_of(theirs: Any) -> tuple[int | None, ...]:
    num: int = theirs.num_hidden_layers
    window: int | None = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:
        return (window,) * num
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def test_shape_and_windows_are_theirs(read: tuple[str, ConfigFacts, Any]) -> None:
    _, ours, theirs = read
    shape = ours.shape
    assert (shape.num_layers, shape.hidden_size, shape.ffn_size) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.intermediate_size,
    )
    assert (shape.num_heads, shape.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (shape.head_dim, shape.vocab_size) == (head_dim, theirs.vocab_size)
    assert shape.tied_embeddings == theirs.tie_word_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert tuple(ours.structure.window(i) for i in range(shape.num_layers)) == windows_of(theirs)
    scalar = getattr(theirs, "query_pre_attn_scalar", head_dim)
    assert (ours.structure.query_scale or 1 / math.sqrt(head_dim)) == pytest.approx(scalar**-0.5)
    for name in ("attn", "final"):
        cap = ours.structure.attention_softcap if name == "attn" else ours.structure.final_softcap
        assert cap == getattr(theirs, f"{name}_logit_softcapping", None)


def test_rotary_frequencies_are_theirs(read: tuple[str, ConfigFacts, Any]) -> None:
    _, ours, theirs = read
    kind = theirs.model_type.removesuffix("_text")
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    rotary = next(c for name, c in vars(module).items() if name.endswith("RotaryEmbedding"))(theirs)

    def check(spec: RopeSpec, prefix: str = "") -> None:
        wanted = getattr(rotary, f"{prefix}inv_freq").numpy()
        np.testing.assert_allclose(inverse_frequencies(spec, ours.shape.context_length), wanted, rtol=1e-5)

    if ours.structure.local_rope is None:
        check(ours.rope)
    else:
        check(ours.rope, "full_attention_")
        check(ours.structure.local_rope, "sliding_attention_")


def test_experts_are_theirs(read: tuple[str, ConfigFacts, Any]) -> None:
    name, ours, theirs = read
    experts = ours.shape.experts
    num = getattr(theirs, "num_local_experts", None) or getattr(theirs, "num_experts", None)
    assert (None if experts is None else experts.num) == num
    if experts is not None:
        assert experts.per_token == theirs.num_experts_per_tok
        assert experts.ffn_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert experts.layers == tuple(range(theirs.num_hidden_layers))
        assert ours.structure.renormalized_experts == getattr(theirs, "norm_topk_prob", True), name


@pytest.mark.parametrize(
    ("name", "length", "eos"),
    [
        ("Llama-3.1-8B-Instruct", 131_072, (128_001, 128_008, 128_009)),
        ("Qwen2.5-7B-Instruct, extended", 131_072, (151_645,)),
        ("gemma-3-1b-it", 32_768, (1, 106)),
        ("gemma-3-4b-it", 131_072, (1, 106)),
    ],
)
def test_contexts_and_end_tokens_are_those_of_the_model_cards(
    name: str, length: int, eos: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    facts = read_config(tmp_path / "config.json")
    assert (facts.shape.context_length, facts.eos_token_ids) == (length, eos)

"""Values that public planners got wrong, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferloop.core.shape import Experts, ModelShape

SMOLLM2 = ModelShape("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_embeddings=True)
LLAMA_8B = ModelShape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, tied_embeddings=False)
QWEN3_06B = ModelShape("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 40960, tied_embeddings=True)


def test_kv_bytes_follow_the_kv_heads_not_the_query_heads() -> None:
    assert LLAMA_8B.kv_bytes_per_token("bf16") == 131_072
    assert SMOLLM2.kv_bytes_per_token("bf16") == 23_040


def test_an_explicit_head_dim_is_used_as_given() -> None:
    assert QWEN3_06B.kv_bytes_per_token("bf16") == 114_688
    assert QWEN3_06B.kv_bytes_per_token("bf16") * 40_960 == 4.375 * 2**30


def test_kv_format_is_independent_of_the_weight_format() -> None:
    assert LLAMA_8B.kv_bytes_per_token("fp8") == 65_536
    assert LLAMA_8B.kv_bytes_per_token("q8_0") == 65_536 * 34 / 32


def test_parameter_counts_match_the_published_ones() -> None:
    assert LLAMA_8B.num_params == pytest.approx(8.03e9, rel=1e-3)
    assert SMOLLM2.num_params == pytest.approx(134.5e6, rel=1e-3)


def test_experts_count_once_each_and_compute_few() -> None:
    """Mixtral 8x7B and Qwen3-30B-A3B, whose names and cards say so."""
    mixtral = ModelShape("mixtral", 32, 4096, 32, 8, 128, 14336, 32000, 32768, tied_embeddings=False)
    mixtral = replace(mixtral, experts=Experts(8, 2, 14336, tuple(range(32))))
    assert mixtral.num_params == pytest.approx(46.7e9, rel=1e-3)
    assert mixtral.matmul_params == pytest.approx(12.8e9, rel=1e-2)
    qwen = ModelShape("qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, 40960, tied_embeddings=False)
    qwen = replace(qwen, experts=Experts(128, 8, 768, tuple(range(48))))
    assert qwen.num_params == pytest.approx(30.5e9, rel=3e-3)
    assert qwen.matmul_params == pytest.approx(3.0e9, rel=2e-2)


def test_untying_the_embedding_adds_it_once() -> None:
    untied = replace(SMOLLM2, tied_embeddings=False)
    assert untied.num_params - SMOLLM2.num_params == 49152 * 576


def test_products_of_the_layers_and_the_head_are_all_matrices() -> None:
    assert SMOLLM2.product_params == {
        "qkv": 30 * 576 * 960,
        "out": 30 * 576 * 576,
        "gate_up": 30 * 576 * 3072,
        "down": 30 * 1536 * 576,
    }
    assert SMOLLM2.matmul_params == 106_168_320 + 49152 * 576


def test_a_layer_without_kv_heads_has_no_attention_weights() -> None:
    some = replace(SMOLLM2, kv_heads_per_layer=(3,) * 29 + (0,))
    assert SMOLLM2.num_params - some.num_params == 576 * (960 + 576)

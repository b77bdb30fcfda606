"""Values that public planners got wrong, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferloop.core.shape import ModelShape

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

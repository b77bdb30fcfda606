"""Bytes of known models, in the ways in which others got them wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferloop.core.errors import UsageError
from inferloop.core.shape import ModelShape
from inferloop.core.units import GIB
from inferloop.plan.memory import replica_memory

LLAMA_8B = ModelShape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, tied_embeddings=False)
QWEN3_06B = ModelShape("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 40960, tied_embeddings=True)
LLAMA_70B = ModelShape("llama", 80, 8192, 64, 8, 128, 28672, 128256, 131072, tied_embeddings=False)


def test_kv_counts_kv_heads_not_query_heads() -> None:
    m = replica_memory(LLAMA_8B, memory_bytes=80 * GIB, sequence_tokens=8192)
    assert m.kv_bytes_per_token == 131_072
    assert m.fits


def test_head_dim_is_read_not_derived() -> None:
    m = replica_memory(QWEN3_06B, memory_bytes=24 * GIB, sequence_tokens=40_960)
    assert m.kv_bytes_per_token == 114_688
    assert m.kv_bytes_per_token * 40_960 == 4.375 * GIB
    derived = replace(QWEN3_06B, head_dim=QWEN3_06B.hidden_size // QWEN3_06B.num_heads)
    assert derived.kv_bytes_per_token() * 40_960 == 2.1875 * GIB


def test_weights_and_kv_have_formats_of_their_own() -> None:
    four_bit = replica_memory(LLAMA_8B, memory_bytes=24 * GIB, sequence_tokens=4096, weight_format="q4_1")
    assert four_bit.kv_bytes_per_token == 131_072
    assert 4.0e9 < four_bit.weight_bytes < 5.1e9
    fp8_kv = replica_memory(
        LLAMA_8B, memory_bytes=24 * GIB, sequence_tokens=4096, weight_format="q4_1", kv_format="fp8"
    )
    assert fp8_kv.kv_bytes_per_token == 65_536
    assert fp8_kv.weight_bytes == four_bit.weight_bytes
    q8 = replica_memory(LLAMA_8B, memory_bytes=24 * GIB, sequence_tokens=4096, kv_format="q8_0")
    assert q8.kv_bytes_per_token == 131_072 / 2 * 34 / 32


def test_what_an_engine_takes_for_a_token_wins() -> None:
    codes_and_scales = 32 * 8 * (2 * 128 + 4)
    m = replica_memory(
        LLAMA_8B, memory_bytes=24 * GIB, sequence_tokens=4096, kv_format="int8", kv_bytes_per_token=codes_and_scales
    )
    assert m.kv_bytes_per_token == codes_and_scales


def test_what_cannot_start_does_not_fit() -> None:
    m = replica_memory(LLAMA_70B, memory_bytes=int(79.2 * GIB), sequence_tokens=4096)
    assert not m.fits
    assert m.num_kv_tokens == m.num_sequences == 0
    assert m.weight_bytes / GIB == pytest.approx(131.4, abs=0.1)
    assert "short" in m.reason


def test_one_sequence_must_fit() -> None:
    weights = 15 * GIB
    overhead = GIB
    memory = weights + overhead + 4096 * 131_072
    exact = replica_memory(
        LLAMA_8B,
        memory_bytes=memory,
        sequence_tokens=4096,
        weight_bytes=weights,
        utilization=1.0,
        overhead_bytes=overhead,
    )
    assert (exact.fits, exact.num_sequences, exact.num_kv_tokens) == (True, 1, 4096)
    one_more = replica_memory(
        LLAMA_8B,
        memory_bytes=memory,
        sequence_tokens=4097,
        weight_bytes=weights,
        utilization=1.0,
        overhead_bytes=overhead,
    )
    assert not one_more.fits


def test_bad_formats_name_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean bf16"):
        replica_memory(LLAMA_8B, memory_bytes=GIB, sequence_tokens=1, kv_format="bf6")
    with pytest.raises(UsageError, match="above 0"):
        replica_memory(LLAMA_8B, memory_bytes=0, sequence_tokens=1)


def test_devices_that_share_a_replica_each_hold_a_part() -> None:
    """Eight KV heads over three: somebody has three of them. Over sixteen, each is kept twice."""
    alone = replica_memory(LLAMA_70B, memory_bytes=int(79.2 * GIB), sequence_tokens=4096)
    two = replica_memory(LLAMA_70B, memory_bytes=int(79.2 * GIB), sequence_tokens=4096, num_ranks=2)
    assert not alone.fits and two.fits
    assert two.weight_bytes == pytest.approx(alone.weight_bytes / 2, abs=1)
    per_token = [
        replica_memory(LLAMA_70B, memory_bytes=GIB, sequence_tokens=1, num_ranks=num).kv_bytes_per_token
        for num in (1, 2, 3, 16)
    ]
    assert [per_token[0] * part / 8 for part in (8, 4, 3, 1)] == per_token
    with pytest.raises(UsageError, match="1 rank or more"):
        replica_memory(LLAMA_70B, memory_bytes=GIB, sequence_tokens=1, num_ranks=0)

"""What the native runner takes beside the weights."""

from __future__ import annotations

from inferloop.core.shape import ModelShape
from inferloop.engine.compute.native import _native
from inferloop.engine.compute.native.config import KvFormat

BLOCK_SIZE = 16
"""Tokens."""


def block_bytes(shape: ModelShape, kv: KvFormat) -> int:
    """Of a block of tokens in all layers, scales included."""
    return shape.num_layers * shape.kv_heads[0] * _native.kv_block_bytes(kv, shape.head_dim)


def partial_bytes(shape: ModelShape, num_positions: int, num_threads: int) -> int:
    """The most that a step of attention puts down of long contexts: what threads that share one found in its parts.
    The last layer, which computes fewer rows, has its own."""
    group = shape.num_heads // shape.kv_heads[0]
    return 2 * _native.most_partial_bytes(num_threads, group, shape.head_dim, num_positions)


def expert_bytes(shape: ModelShape, num_threads: int) -> int:
    """The most that a step takes for what lies between the products of experts."""
    experts = shape.experts
    if experts is None:
        return 0
    return _native.most_expert_bytes(experts.num, experts.per_token, shape.hidden_size, experts.ffn_size, num_threads)

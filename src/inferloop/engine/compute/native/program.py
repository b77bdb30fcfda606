"""What the native step is to compute: a model's header as numbers and tables for C++."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.rope import rope_tables
from inferloop.models.headers import ModelHeader


@dataclass(frozen=True, slots=True)
class Program:
    """`windows`: of each layer, how many keys a query sees, itself included; 0: all. `cos` and `sin` by position, fp32
    [positions][rotated dimensions / 2]."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    attention_scale: float
    windows: tuple[int, ...]
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


def check_runs(header: ModelHeader) -> None:
    """Raise ModelFileError for a model that the native kernels have no form for."""
    shape = header.shape
    if len(set(shape.kv_heads)) > 1:
        raise ModelFileError("the native runner needs the same number of KV heads in every layer")
    for name in uncomputed_parts(header):
        raise ModelFileError(f"the native runner has no {name}")
    if shape.head_dim % 16:
        raise ModelFileError(f"the native runner needs heads of a multiple of 16, these are of {shape.head_dim}")
    widths = {
        "the hidden size": shape.hidden_size,
        "all query heads together": shape.num_heads * shape.head_dim,
        "the feed-forward size": shape.ffn_size,
    }
    for name, width in widths.items():
        if width % 32:
            raise ModelFileError(f"the native runner needs a multiple of 32 for {name}, which is {width}")


def uncomputed_parts(header: ModelHeader) -> Iterator[str]:
    """What the model has and the kernels have not."""
    structure = header.structure
    parts = {
        "experts": header.shape.experts is not None,
        "soft cap of scores": structure.attention_softcap is not None,
        "soft cap of logits": structure.final_softcap is not None,
        "rotary base of local layers": structure.local_rope is not None,
        "norms behind attention and feed-forward": structure.output_norms,
        "scale of the embedding": structure.embedding_scale != 1.0,
        "scale of queries": structure.query_scale is not None,
        "gated unit but silu": structure.activation != "silu",
        "offset of the norms": structure.norm_offset != 0.0,
    }
    yield from (name for name, has in parts.items() if has)


def program_of(header: ModelHeader, num_positions: int, rope_factors: NDArray[np.float32] | None) -> Program:
    """For tokens at positions below `num_positions`. Raises ModelFileError as `check_runs`."""
    check_runs(header)
    shape = header.shape
    cos, sin = rope_tables(header.rope, num_positions, shape.context_length, rope_factors)
    return Program(
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.kv_heads[0],
        head_dim=shape.head_dim,
        ffn_size=shape.ffn_size,
        vocab_size=shape.vocab_size,
        norm_eps=header.norm_eps,
        attention_scale=1 / math.sqrt(shape.head_dim),
        windows=tuple(header.structure.window(i) or 0 for i in range(shape.num_layers)),
        cos=np.ascontiguousarray(cos),
        sin=np.ascontiguousarray(sin),
    )

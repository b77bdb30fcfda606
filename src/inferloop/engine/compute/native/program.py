"""What the native step is to compute: a model's header as numbers and tables for C++."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.rope import rope_tables
from inferloop.models.headers import ModelHeader
from inferloop.models.headers.structure import Activation


@dataclass(frozen=True, slots=True)
class Program:
    """`windows`: of each layer, how many keys a query sees, itself included; 0: all. `ropes`: of each layer, which of
    the tables it rotates by. `cos` and `sin` by table and position, fp32 [tables][positions][rotated dimensions / 2].
    Soft caps of 0 are none. `routed`: of each layer, whether it has experts; `ffn_size` is that of the others, 0
    without any."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    renormalized_experts: bool
    vocab_size: int
    norm_eps: float
    attention_scale: float
    attention_softcap: float
    final_softcap: float
    embedding_scale: float
    activation: Activation
    routed: tuple[bool, ...]
    windows: tuple[int, ...]
    ropes: tuple[int, ...]
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


def check_runs(header: ModelHeader) -> None:
    """Raise ModelFileError for a model that the native kernels have no form for."""
    shape = header.shape
    if len(set(shape.kv_heads)) > 1:
        raise ModelFileError("the native runner needs the same number of KV heads in every layer")
    if shape.head_dim % 16:
        raise ModelFileError(f"the native runner needs heads of a multiple of 16, these are of {shape.head_dim}")
    widths = {
        "the hidden size": shape.hidden_size,
        "all query heads together": shape.num_heads * shape.head_dim,
    }
    experts = shape.experts
    if experts is None or len(experts.layers) < shape.num_layers:
        widths["the feed-forward size"] = shape.ffn_size
    if experts is not None:
        widths["the feed-forward size of experts"] = experts.ffn_size
    for name, width in widths.items():
        if width % 32:
            raise ModelFileError(f"the native runner needs a multiple of 32 for {name}, which is {width}")


def program_of(header: ModelHeader, num_positions: int, rope_factors: NDArray[np.float32] | None) -> Program:
    """For tokens at positions below `num_positions`. Raises ModelFileError as `check_runs`."""
    check_runs(header)
    shape, structure = header.shape, header.structure
    tables = [rope_tables(header.rope, num_positions, shape.context_length, rope_factors)]
    if structure.local_rope is not None:
        tables.append(rope_tables(structure.local_rope, num_positions, shape.context_length))
    cos, sin = (np.stack(table) for table in zip(*tables, strict=True))
    layers, experts = range(shape.num_layers), shape.experts
    routed = tuple(experts is not None and i in experts.layers for i in layers)
    return Program(
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.kv_heads[0],
        head_dim=shape.head_dim,
        ffn_size=0 if all(routed) else shape.ffn_size,
        num_experts=experts.num if experts else 0,
        experts_per_token=experts.per_token if experts else 0,
        expert_ffn_size=experts.ffn_size if experts else 0,
        renormalized_experts=structure.renormalized_experts,
        routed=routed,
        vocab_size=shape.vocab_size,
        norm_eps=header.norm_eps,
        attention_scale=1 / math.sqrt(shape.head_dim) if structure.query_scale is None else structure.query_scale,
        attention_softcap=structure.attention_softcap or 0.0,
        final_softcap=structure.final_softcap or 0.0,
        embedding_scale=structure.embedding_scale,
        activation=structure.activation,
        windows=tuple(structure.window(i) or 0 for i in layers),
        ropes=tuple(int(structure.is_local(i)) for i in layers),
        cos=cos,
        sin=sin,
    )

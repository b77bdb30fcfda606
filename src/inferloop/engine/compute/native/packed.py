"""A model's weights in the layout that the native kernels read: one buffer, and where everything lies in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Format = Literal["f32", "bf16", "group"]
TILE = 16
GROUP = 32


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """n outputs and k inputs, as `Matrix` in cpp/types.h describes; `offset_bytes` into the buffer, 64-byte aligned."""

    format: Format
    n: int
    k: int
    offset_bytes: int
    tile_bytes: int
    bits: int = 8
    group: int = GROUP
    code_offset: int = 0
    wide: bool = False
    has_min: bool = False

    @property
    def num_bytes(self) -> int:
        return -(-self.n // TILE) * self.tile_bytes


@dataclass(frozen=True, slots=True)
class PackedModel:
    """`matrices`: "embed", "head" (absent when tied), and for every layer "layers.{i}.qkv", ".out", ".gate_up" and
    ".down". qkv stacks q, k, v; gate_up takes 32 outputs of gate and 32 of up in turn, so that four tiles hold both
    halves of 32 activations. q and k have rotary pairs (i, i + dim / 2). Layers with experts have ".router" in f32, and
    ".gate_up" and ".down" stack one expert after the other.

    `vectors`, fp32: "norm", "layers.{i}.input_norm", ".post_norm", and where the model has them ".q_norm", ".k_norm"
    and the biases ".qkv.bias", ".out.bias", ".gate_up.bias" (in gate_up's order), ".down.bias"; "rope_factors".

    `precision` says in words what the matrices are, like "q4_1" or "int8".
    """

    buffer: NDArray[np.uint8]
    matrices: Mapping[str, PackedMatrix]
    vectors: Mapping[str, NDArray[np.float32]]
    precision: str


@dataclass(frozen=True, slots=True)
class PackLayout:
    """All of a packed model but its bytes; `vectors` as (offset into the buffer, how many)."""

    precision: str
    matrices: dict[str, PackedMatrix]
    vectors: dict[str, tuple[int, int]]
    num_bytes: int

    def over(self, buffer: NDArray[np.uint8]) -> PackedModel:
        """The model whose bytes these are."""
        vectors = {
            name: buffer[begin : begin + 4 * count].view(np.float32) for name, (begin, count) in self.vectors.items()
        }
        return PackedModel(buffer, self.matrices, vectors, self.precision)

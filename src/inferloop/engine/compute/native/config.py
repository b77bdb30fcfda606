"""Settings of the native runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Weights = Literal["stored", "fp32", "bf16", "int8"]
KvFormat = Literal["bf16", "int8"]
Isa = Literal["scalar", "avx2", "avx512", "avx512_bf16", "amx"]


@dataclass(frozen=True, slots=True)
class NativeConfig:
    """`weights`: "stored" keeps a quantized file's own numbers, exactly, and computes in 8-bit activations with a scale
    for every 32; a file that is not quantized is computed in bf16. The others convert first, int8 with a scale for
    every 32 weights. `kv`: how keys and values are kept. The KV memory is `num_blocks` blocks of 16 tokens, or as many
    as `kv_memory_bytes` holds. `num_threads` None: one for each core. `isa` None: the best of this machine."""

    weights: Weights = "stored"
    kv: KvFormat = "bf16"
    num_threads: int | None = None
    num_blocks: int | None = None
    kv_memory_bytes: int = 512 * 2**20
    isa: Isa | None = None

"""Arithmetic of a decoder's architecture: parameters and KV bytes (what a step costs: core.step_cost).

Every number follows from the architecture description alone, so plan, engine and simulate agree.
KV bytes per token = sum over layers of 2 * kv_heads * head_dim * bytes per element (K and V); `head_dim` is read,
never derived from hidden / heads, because many models set it apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Product = Literal["qkv", "out", "gate_up", "down"]
"""The matrix products of a layer; what has the same input is one product."""

BYTES_PER_ELEMENT = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "q8_0": 34 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "q5_0": 22 / 32,
    "q5_1": 24 / 32,
    "iq4_nl": 18 / 32,
    "iq4_xs": 136 / 256,
    "q2_k": 84 / 256,
    "q3_k": 110 / 256,
    "q4_k": 144 / 256,
    "q5_k": 176 / 256,
    "q6_k": 210 / 256,
}
"""Bytes a stored element takes, scales included (GGUF block layouts for the q formats)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Feed-forwards of which a token goes through `per_token` of `num`, each of `ffn_size`, in these layers."""

    num: int
    per_token: int
    ffn_size: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention. Counts, not bytes."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    tied_embeddings: bool
    kv_heads_per_layer: tuple[int, ...] | None = None
    """KV heads of each layer where they differ (0: that layer keeps no KV); None: `num_kv_heads` in every layer."""
    experts: Experts | None = None
    """`ffn_size` is that of the layers without them."""

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """KV heads layer by layer."""
        return self.kv_heads_per_layer or (self.num_kv_heads,) * self.num_layers

    @property
    def num_attention_layers(self) -> int:
        return sum(heads > 0 for heads in self.kv_heads)

    @property
    def product_params(self) -> dict[Product, int]:
        """Weights of each kind of product over all layers: q, k and v together, o, gate and up together, down. Of
        experts those that one token goes through, and of their routers none."""
        q = self.num_heads * self.head_dim * self.num_attention_layers
        kv = self.head_dim * sum(self.kv_heads)
        ffn = self.ffn_size * self.num_layers
        if self.experts is not None:
            each = self.experts.per_token * self.experts.ffn_size - self.ffn_size
            ffn += each * len(self.experts.layers)
        units: dict[Product, int] = {"qkv": q + 2 * kv, "out": q, "gate_up": 2 * ffn, "down": ffn}
        return {name: self.hidden_size * num for name, num in units.items()}

    @property
    def head_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def matmul_params(self) -> int:
        """Weights that every computed token is multiplied with, the output head included."""
        return sum(self.product_params.values()) + self.head_params

    @property
    def num_params(self) -> int:
        """All parameters: matmuls, norms, and the embedding once more when it is not tied to the head."""
        norms = (2 * self.num_layers + 1) * self.hidden_size
        embedding = 0 if self.tied_embeddings else self.head_params
        return self.matmul_params + self._resting_params + norms + embedding

    @property
    def _resting_params(self) -> int:
        """Routers, and the experts that a token does not go through."""
        if self.experts is None:
            return 0
        resting = 3 * (self.experts.num - self.experts.per_token) * self.experts.ffn_size + self.experts.num
        return self.hidden_size * resting * len(self.experts.layers)

    def kv_bytes_per_token(self, kv_format: str = "bf16") -> float:
        return 2 * sum(self.kv_heads) * self.head_dim * BYTES_PER_ELEMENT[kv_format]

    def weight_bytes(self, weight_format: str = "bf16") -> float:
        return self.num_params * BYTES_PER_ELEMENT[weight_format]

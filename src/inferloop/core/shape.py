"""Arithmetic of a decoder's architecture: parameters, KV bytes, FLOPs and bytes of one step.

Every number follows from the architecture description alone, so plan, engine and simulate agree.
KV bytes per token = sum over layers of 2 * kv_heads * head_dim * bytes per element (K and V); `head_dim` is read,
never derived from hidden / heads, because many models set it apart.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_ELEMENT = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "q8_0": 34 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "q4_k": 144 / 256,
    "q5_k": 176 / 256,
    "q6_k": 210 / 256,
}
"""Bytes a stored element takes, scales included (GGUF block layouts for the q formats)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with grouped-query attention. Counts, not bytes."""

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

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """KV heads layer by layer."""
        return self.kv_heads_per_layer or (self.num_kv_heads,) * self.num_layers

    @property
    def attention_params(self) -> int:
        """Weights of q, k, v and o over all layers."""
        q_and_o = 2 * self.hidden_size * self.num_heads * self.head_dim * self.num_layers
        k_and_v = 2 * self.hidden_size * self.head_dim * sum(self.kv_heads)
        return q_and_o + k_and_v

    @property
    def matmul_params(self) -> int:
        """Weights that every computed token is multiplied with, the output head included."""
        ffn = 3 * self.hidden_size * self.ffn_size * self.num_layers
        return self.attention_params + ffn + self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters: matmuls, norms, and the embedding once more when it is not tied to the head."""
        norms = (2 * self.num_layers + 1) * self.hidden_size
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return self.matmul_params + norms + embedding

    def kv_bytes_per_token(self, kv_format: str = "bf16") -> float:
        return 2 * sum(self.kv_heads) * self.head_dim * BYTES_PER_ELEMENT[kv_format]

    def weight_bytes(self, weight_format: str = "bf16") -> float:
        return self.num_params * BYTES_PER_ELEMENT[weight_format]

    def step_flops(self, num_new_tokens: int, num_context_tokens: int, num_sampled: int) -> float:
        """FLOPs of one step: `num_new_tokens` through the layers, attending to `num_context_tokens` keys in all
        (summed over the new tokens), with the head applied to `num_sampled` rows."""
        head = self.vocab_size * self.hidden_size
        layers = self.matmul_params - head
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * num_context_tokens
        return 2.0 * layers * num_new_tokens + 2.0 * head * num_sampled + attention

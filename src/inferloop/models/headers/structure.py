"""What decoders differ in beside their counts: everything here changes numbers, so all of it is part of an identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["none", "linear", "dynamic", "yarn", "llama3"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. Fields that a kind does not use keep their defaults.

    `dim` is how many of each head's dimensions are rotated. Kinds and their fields follow the public Hugging Face
    config: linear and dynamic (factor), yarn (https://arxiv.org/abs/2309.00071), llama3 (wavelength-banded factor).
    """

    theta: float
    dim: int
    kind: RopeKind = "none"
    factor: float = 1.0
    original_context_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Multiplies cos and sin under yarn; None means the paper's 0.1 * ln(factor) + 1."""
    factors_tensor: str | None = None
    """Name of a tensor of dim / 2 divisors of the inverse frequencies (how GGUF carries the llama3 bands)."""


@dataclass(frozen=True, slots=True)
class Structure:
    """How a decoder is put together. The defaults are those of the llama family."""

    windows: tuple[int | None, ...] = ()
    """Of each layer, how many keys a query sees, itself included; None: all before it. Empty: all, in every layer."""
    local_rope: RopeSpec | None = None
    """Rotates queries and keys of the layers with a window, where those have a base of their own."""
    query_scale: float | None = None
    """Scores are multiplied with it; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """c: a score s becomes c * tanh(s / c), before the mask."""
    final_softcap: float | None = None
    """The same of the logits."""
    embedding_scale: float = 1.0
    activation: Activation = "silu"
    qk_norms: bool = False
    output_norms: bool = False
    """Attention and feed-forward are normed on their way back into the residual stream, too."""
    norm_offset: float = 0.0
    """Added to every stored gain of a norm."""
    fp32_norms: bool = False
    """Norms multiply with their gains in fp32 and round once, whatever the rest is computed in."""
    renormalized_experts: bool = True
    """The weights of a token's chosen experts are made to sum to 1."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def is_local(self, layer: int) -> bool:
        """Whether a layer rotates by `local_rope`."""
        return self.local_rope is not None and self.window(layer) is not None

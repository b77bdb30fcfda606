"""What an architecture's own file says: its names, and how its config.json and its GGUF keys are to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from inferloop.core.shape import ModelShape
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.structure import RopeSpec, Structure

ReadConfig = Callable[[Fields, ModelShape], tuple[RopeSpec, Structure]]
ReadGguf = Callable[[Fields, ModelShape, RopeSpec], Structure]
"""Of the keys under the architecture's prefix. Both raise ModelFileError naming what cannot be computed."""

DENSE_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH_GGUF_NAMES = {
    **DENSE_GGUF_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""With norms behind attention and feed-forward."""
EXPERT_GGUF_NAMES = {
    **DENSE_GGUF_NAMES,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Experts are stacked in one tensor; each becomes one of its own."""


@dataclass(frozen=True, slots=True)
class Family:
    """`name` is transformers' model_type. `gguf_names`: a layer's tensors, without "blk.N." and ".weight"."""

    name: str
    gguf_architecture: str
    read_config: ReadConfig
    read_gguf: ReadGguf
    model_types: tuple[str, ...] = ()
    """Others that config.json may say for the same."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """What config.json may leave out."""
    gguf_names: Mapping[str, str] = field(default_factory=lambda: DENSE_GGUF_NAMES)
    gguf_interleaved: bool = False
    """The converter permutes rows of q and k, because ggml rotates neighbouring pairs."""
    has_experts: bool = False

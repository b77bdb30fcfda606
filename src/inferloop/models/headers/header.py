"""The one description of a model, whichever file format it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import ModelShape

RopeKind = Literal["none", "linear", "dynamic", "yarn", "llama3"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose tensors and metadata we know how to name."""


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
class TensorInfo:
    """Where one weight lies. `shape` is row-major, outermost first ((out, in) for a matrix), in both file formats.

    `dtype` is lower case: fp32 fp16 bf16 int8 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k .. q6_k, and so on. `offset` is absolute.
    `interleaved_heads` h > 0: the rows are stored head by head with rotary pairs side by side (2i, 2i + 1), as GGUF
    does for q and k of the llama family. The loader restores halves side by side (i, i + dim / 2) with
    rows.reshape(h, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(h * head_dim, -1).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int
    interleaved_heads: int = 0


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """Everything known before loading. Tensor names are the Hugging Face ones of the llama family."""

    shape: ModelShape
    rope: RopeSpec
    norm_eps: float
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    stored_precision: str
    """The dtype that most weight bytes have."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    tool_chat_template: str | None = None
    """Another one for chats that offer tools, where the model has one of its own for them."""
    name: str | None = None
    sliding_window: int | None = None
    license: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict, repr=False)
    """The file's own keys: GGUF key-values, or config.json's object. Large; for tokenizers and curious people."""


def stored_precision(tensors: Mapping[str, TensorInfo]) -> str:
    """The dtype holding the most elements of matrices; "fp32" for a model without any."""
    count: dict[str, int] = {}
    for info in tensors.values():
        if len(info.shape) == 2:
            count[info.dtype] = count.get(info.dtype, 0) + info.shape[0] * info.shape[1]
    return max(count, key=lambda d: (count[d], d)) if count else "fp32"


def check_tensors(file: Path, shape: ModelShape, tensors: Mapping[str, TensorInfo]) -> None:
    """Every weight of the family is there with the right shape, and so is a bias or q/k norm if it is there. Raises
    ModelFileError naming the first that is not."""
    expected = expected_shapes(shape)
    for name in expected:
        if name not in tensors:
            raise ModelFileError(f"{file}: tensor {name} is missing")
    for name, want in {**expected, **_optional_shapes(shape, expected)}.items():
        info = tensors.get(name)
        if info is not None and info.shape != want:
            raise ModelFileError(f"{file}: tensor {name} has shape {info.shape}, the header implies {want}")


def expected_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that every dense llama-family decoder has (biases and q/k norms left out)."""
    h, q = shape.hidden_size, shape.num_heads * shape.head_dim
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, h),
        "model.norm.weight": (h,),
    }
    if not shape.tied_embeddings:
        out["lm_head.weight"] = (shape.vocab_size, h)
    for i, num_kv_heads in enumerate(shape.kv_heads):
        p = f"model.layers.{i}."
        kv = num_kv_heads * shape.head_dim
        out[p + "input_layernorm.weight"] = (h,)
        out[p + "post_attention_layernorm.weight"] = (h,)
        if num_kv_heads:
            out[p + "self_attn.q_proj.weight"] = (q, h)
            out[p + "self_attn.k_proj.weight"] = (kv, h)
            out[p + "self_attn.v_proj.weight"] = (kv, h)
            out[p + "self_attn.o_proj.weight"] = (h, q)
        out[p + "mlp.gate_proj.weight"] = (shape.ffn_size, h)
        out[p + "mlp.up_proj.weight"] = (shape.ffn_size, h)
        out[p + "mlp.down_proj.weight"] = (h, shape.ffn_size)
    return out


def _optional_shapes(shape: ModelShape, expected: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {
        name.removesuffix("weight") + "bias": want[:1]
        for name, want in expected.items()
        if name.startswith("model.layers.") and len(want) == 2
    }
    for i in range(shape.num_layers):
        out |= {f"model.layers.{i}.self_attn.{part}_norm.weight": (shape.head_dim,) for part in "qk"}
    return out

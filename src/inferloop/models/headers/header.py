"""The one description of a model, whichever file format it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inferloop.core.shape import ModelShape
from inferloop.models.headers.structure import RopeSpec, Structure


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one weight lies. `shape` is row-major, outermost first ((out, in) for a matrix), in both file formats.

    `dtype` is lower case: fp32 fp16 bf16 int8 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k .. q6_k, and so on. `offset` is absolute.
    `interleaved_heads` h > 0: the rows are stored head by head with rotary pairs side by side (2i, 2i + 1), as GGUF
    does for q and k of some families. The loader restores halves side by side (i, i + dim / 2) with
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
    """Everything known before loading. Tensor names are those of Hugging Face, experts always one by one and named as
    Qwen3 names them."""

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
    structure: Structure = field(default_factory=Structure)
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

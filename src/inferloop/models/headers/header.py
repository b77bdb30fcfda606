"""The one description of a model, whichever file format it came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import ModelShape
from inferloop.models.headers.dtypes import block_of
from inferloop.models.headers.structure import RopeSpec, Structure

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one weight lies. `shape` is row-major, outermost first ((out, in) for a matrix), in both file formats.

    `dtype` is lower case: fp32 fp16 bf16 int8 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k .. q6_k, and so on. `offset` is absolute.
    `interleaved_heads` h > 0: the rows are stored head by head with rotary pairs side by side (2i, 2i + 1), as GGUF
    does for q and k of some families. The loader restores halves side by side (i, i + dim / 2) with
    rows.reshape(h, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(h * head_dim, -1).
    `stride` > 0: bytes from one row to the next, of which only the first belong to this tensor, a part of a wider one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int
    interleaved_heads: int = 0
    stride: int = 0

    @property
    def num_rows(self) -> int:
        """As they lie in the file; a vector is one row."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // max(self.num_rows, 1)

    def part(self, rows: slice = _ALL, columns: slice = _ALL) -> TensorInfo:
        """A matrix of some neighbouring rows and columns of this one, or a vector of some `rows` of this one: where
        they lie, so that they are read without the rest.

        Raises ModelFileError for columns that cut a quantized block, or rows that cut a head of interleaved rows.
        """
        assert 1 <= len(self.shape) <= 2, "parts are of matrices and vectors"
        if len(self.shape) == 1:
            return self._columns(rows)
        first, end = _bounds(rows, self.shape[0])
        heads, each = self.interleaved_heads, self.shape[0] // max(self.interleaved_heads, 1)
        if heads and (first % each or end % each):
            raise self._cut("rows", first, end, f"heads of {each}")
        found = replace(
            self,
            shape=(end - first, self.shape[1]),
            offset=self.offset + first * (self.stride or self.row_bytes),
            num_bytes=(end - first) * self.row_bytes,
            interleaved_heads=(end - first) // each if heads else 0,
        )
        return found._columns(columns)

    def _columns(self, columns: slice) -> TensorInfo:
        first, end = _bounds(columns, self.shape[-1])
        block, block_bytes = block_of(self.dtype)
        if first % block or end % block:
            raise self._cut("columns", first, end, f"blocks of {block}")
        num_bytes = (end - first) // block * block_bytes
        return replace(
            self,
            shape=(*self.shape[:-1], end - first),
            offset=self.offset + first // block * block_bytes,
            num_bytes=self.num_rows * num_bytes,
            stride=self.stride or (self.row_bytes if num_bytes < self.row_bytes and self.num_rows > 1 else 0),
        )

    def _cut(self, what: str, first: int, end: int, into: str) -> ModelFileError:
        return ModelFileError(
            f"{self.file}: tensor {self.name} cannot be cut into {what} {first} to {end}: it has {into} {self.dtype}"
        )


def _bounds(part: slice, size: int) -> tuple[int, int]:
    first, end, step = part.indices(size)
    assert step == 1 and first < end, "a part is some neighbours"
    return first, end


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

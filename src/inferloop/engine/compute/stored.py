"""Weights as they lie in model files: rows of a tensor, as bytes or as fp32."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.groups import GROUP_TYPES, read_groups
from inferloop.models.headers import ModelHeader, TensorInfo

_PLAIN: dict[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "fp64": np.dtype("<f8")}
READABLE = ("bf16", *_PLAIN, *GROUP_TYPES)


def check_readable(info: TensorInfo) -> None:
    """Raises ModelFileError for a type that is not in READABLE."""
    if info.dtype not in READABLE:
        raise ModelFileError(f"{info.file}: tensor {info.name} is {info.dtype}; readable are {', '.join(READABLE)}")


def stored_rows(info: TensorInfo, begin: int = 0, end: int | None = None) -> NDArray[np.uint8]:
    """Rows begin .. end - 1 (None: all) as the file holds them: uint8 [rows][bytes of a row], a vector being one row.

    Read and not mapped: whoever copies another file over this one meanwhile makes it short for a moment, and a mapped
    page that is gone is no error but the end of the process. Raises ModelFileError for a file that cannot be read or a
    type that is not in READABLE.
    """
    check_readable(info)
    end = info.num_rows if end is None else end
    out = np.empty((end - begin, info.row_bytes), np.uint8)
    try:
        with info.file.open("rb", buffering=0) as file:
            _read_into(file, out, info.offset + begin * (info.stride or info.row_bytes), info.stride)
    except OSError as problem:
        raise ModelFileError(f"{info.file}: tensor {info.name} cannot be read: {problem}") from problem
    except EOFError:
        raise ModelFileError(f"{info.file}: tensor {info.name} cannot be read: the file ends within it") from None
    return out


def _read_into(file: FileIO, out: NDArray[np.uint8], offset: int, stride: int) -> None:
    """Rows that follow one another at once, those that are `stride` apart one by one. Raises EOFError."""
    for i, piece in enumerate(out if stride else [out.reshape(-1)]):
        left, at = memoryview(piece), offset + i * stride
        while left:  # the system hands out two gigabytes at most
            num = os.preadv(file.fileno(), [left], at)
            if not num:
                raise EOFError
            left, at = left[num:], at + num


def values_of(dtype: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Stored rows as fp32 [rows][k], exactly (but for fp64). The array owns its memory."""
    if dtype in GROUP_TYPES:
        return read_groups(dtype, rows).values()
    if dtype == "bf16":
        return (np.ascontiguousarray(rows).view("<u2").astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(rows).view(_PLAIN[dtype]).astype(np.float32)


def read_tensor(info: TensorInfo) -> NDArray[np.float32]:
    """One stored tensor as fp32 in its shape; the array owns its memory. Raises ModelFileError."""
    return values_of(info.dtype, stored_rows(info)).reshape(info.shape)


def half_split(values: NDArray[Any], info: TensorInfo, head_dim: int) -> NDArray[Any]:
    """Undo GGUF's interleaved rotary pairs in the rows of a tensor (or of their numbers), so that pair i is
    (i, i + head_dim / 2) everywhere."""
    heads = info.interleaved_heads
    if not heads:
        return values
    return np.ascontiguousarray(values.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2)).reshape(values.shape)


@contextlib.contextmanager
def unchanged(header: ModelHeader) -> Iterator[None]:
    """While the weights are read: raises ModelFileError afterwards when a file was replaced or written to meanwhile."""
    before = _states(header)
    yield
    for file, state in _states(header).items():
        if before[file] != state:
            raise ModelFileError(f"{file}: was changed while it was read")


def _states(header: ModelHeader) -> dict[Path, tuple[int, int, int]]:
    """By file, what becomes another when it is replaced or written to."""
    out = {}
    for file in {info.file for info in header.tensors.values()}:
        try:
            found = file.stat()
        except OSError as problem:
            raise ModelFileError(f"{file}: cannot be read: {problem}") from problem
        out[file] = (found.st_ino, found.st_size, found.st_mtime_ns)
    return out

"""A packed model as one file, written once and mapped by every process that runs the model."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferloop.engine.compute.native.packed import PackedModel, PackLayout
from inferloop.models.cache import sync_folder

_log = logging.getLogger(__name__)
_MAGIC = b"inferloop packed"
_PREFIX = struct.Struct("<16sQQ32s")  # magic, bytes of the layout's JSON, checksum of the data, sha256 of the JSON
_PAGE = 4096
"""The data begin at the first page after the JSON."""

Fill = Callable[[NDArray[np.uint8]], None]


def read_packed(path: Path) -> PackedModel | None:
    """Mapped read-only; None when it is not there, or was damaged, which is logged and ends it."""
    try:
        with path.open("rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0  # nothing can be mapped
            content = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
    except OSError as problem:
        _log.warning("the packed model %s cannot be read: %s", path, problem)
        return None
    model = _sound(np.frombuffer(content, np.uint8))
    if model is None:
        _log.warning("the packed model %s is damaged, it will be packed again", path)
        with contextlib.suppress(OSError):
            path.unlink()
    return model


def write_packed(path: Path, layout: PackLayout, fill: Fill) -> None:
    """Let `fill` write the data into a new file, and put that in place of `path` once it is whole and on disk.

    Raises OSError, among others when the disk has no room.
    """
    described = msgspec.json.encode(layout)
    begin = _first_page(len(described))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "r+b") as file:
            # Reserved first: a mapped page for which the disk has no room would be a bus error.
            os.posix_fallocate(file.fileno(), 0, begin + layout.num_bytes)
            mapped = np.memmap(file, np.uint8, "r+")
            data = mapped[begin:]
            fill(data)
            prefix = _PREFIX.pack(_MAGIC, len(described), _checksum(data), hashlib.sha256(described).digest())
            mapped[: len(prefix) + len(described)] = np.frombuffer(prefix + described, np.uint8)
            mapped.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    sync_folder(path.parent)


def pack_in_memory(layout: PackLayout, fill: Fill) -> PackedModel:
    buffer = np.frombuffer(mmap.mmap(-1, max(layout.num_bytes, 1)), np.uint8)  # begins at a page
    fill(buffer)
    buffer.flags.writeable = False
    return layout.over(buffer)


def _sound(content: NDArray[np.uint8]) -> PackedModel | None:
    if len(content) < _PREFIX.size:
        return None
    magic, length, checksum, digest = _PREFIX.unpack(content[: _PREFIX.size].tobytes())
    described = content[_PREFIX.size : _PREFIX.size + length].tobytes()
    if magic != _MAGIC or hashlib.sha256(described).digest() != digest:
        return None
    layout = msgspec.json.decode(described, type=PackLayout)
    data = content[_first_page(length) :]
    if len(data) != layout.num_bytes or _checksum(data) != checksum:
        return None
    return layout.over(data)


def _first_page(length: int) -> int:
    return -(-(_PREFIX.size + length) // _PAGE) * _PAGE


def _checksum(data: NDArray[np.uint8]) -> int:
    """The sum of its words: as fast as memory is read, which the first step would have to do anyway. Sections are
    multiples of 64 bytes, so there are no odd bytes."""
    return int(data.view(np.uint64).sum(dtype=np.uint64))

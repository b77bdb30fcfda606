"""A packed model as one file, written once and mapped by every process that runs the model."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferloop.core.errors import EnvironmentLacksError
from inferloop.core.units import human_bytes
from inferloop.engine.compute.native.packed import PackedModel, PackLayout
from inferloop.models.cache import sync_folder

_log = logging.getLogger(__name__)
_MAGIC = b"inferloop packed"
_PREFIX = struct.Struct("<16sQQ32s")  # magic, bytes of the layout's JSON, checksum of the data, sha256 of the JSON
_PAGE = 4096
"""The data begin at the first page after the JSON."""
_KEPT = 16
"""Packed models in a folder. Each is as large as the model's file or larger."""

Fill = Callable[[NDArray[np.uint8]], None]


def read_packed(path: Path, layout: PackLayout) -> PackedModel | None:
    """Mapped read-only; None when it is not there, or when it is damaged or of another layout, which ends it."""
    try:
        with path.open("rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0  # nothing can be mapped
            content = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
    except OSError as problem:
        _log.warning("the packed model %s cannot be read: %s", path, problem)
        return None
    data = _sound(np.frombuffer(content, np.uint8), layout)
    if data is None:
        _log.warning("the packed model %s is damaged or of another form, it will be packed again", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    with contextlib.suppress(OSError):  # of another user, or on a disk that cannot be written
        os.utime(path)  # used last now
    return layout.over(data)


def make_room(path: Path) -> None:
    """Before `path` is written, and under the lock: remove what earlier revisions of the layout left of the same model,
    what processes that were killed had begun, and the models used longest ago, so that the folder does not grow without
    end. Who has one mapped keeps it."""
    folder, of_model = path.parent, path.stem.rpartition("-")[0]
    used = {file: file.stat().st_mtime_ns for file in folder.glob("*.bin") if not file.name.startswith(f"{of_model}-")}
    longest_ago = sorted(used, key=lambda file: used[file])[: -(_KEPT - 1)]
    for file in (*folder.glob(f"{of_model}-*.bin"), *folder.glob(".*.bin.*"), *longest_ago):
        with contextlib.suppress(OSError):  # of another user, or gone already
            file.unlink()


def write_packed(path: Path, layout: PackLayout, fill: Fill) -> None:
    """Let `fill` write the data into a new file, and put that in place of `path` once it is whole and on disk.

    Raises OSError, among others when the disk has no room.
    """
    begin = _data_begin(layout)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("x+b") as file:
            # Reserved first: a mapped page for which the disk has no room would be a bus error.
            os.posix_fallocate(file.fileno(), 0, begin + layout.num_bytes)
            mapped = np.memmap(file, np.uint8, "r+")
            data = mapped[begin:]
            fill(data)
            head = _head(layout, data)
            mapped[: len(head)] = np.frombuffer(head, np.uint8)
            mapped.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def pack_in_memory(layout: PackLayout, fill: Fill) -> PackedModel:
    """Raises EnvironmentLacksError without room for it."""
    try:
        memory = mmap.mmap(-1, layout.num_bytes)  # begins at a page
    except OSError as problem:
        what = f"no room in memory for {human_bytes(layout.num_bytes)} of weights: {problem}"
        raise EnvironmentLacksError(what, fix="In a cache folder that can be written they need less.") from problem
    buffer = np.frombuffer(memory, np.uint8)
    fill(buffer)
    buffer.flags.writeable = False
    return layout.over(buffer)


def _sound(content: NDArray[np.uint8], layout: PackLayout) -> NDArray[np.uint8] | None:
    """The data of a file, when nothing is wrong with it."""
    begin = _data_begin(layout)
    if len(content) != begin + layout.num_bytes:
        return None
    data = content[begin:]
    head = _head(layout, data)
    return data if content[: len(head)].tobytes() == head else None


def _head(layout: PackLayout, data: NDArray[np.uint8]) -> bytes:
    described = msgspec.json.encode(layout)
    return _PREFIX.pack(_MAGIC, len(described), _checksum(data), hashlib.sha256(described).digest()) + described


def _data_begin(layout: PackLayout) -> int:
    return -(-(_PREFIX.size + len(msgspec.json.encode(layout))) // _PAGE) * _PAGE


def _checksum(data: NDArray[np.uint8]) -> int:
    """The sum of its words: as fast as memory is read, which the first step would have to do anyway. Sections are
    multiples of 64 bytes, so there are no odd bytes."""
    return int(data.view(np.uint64).sum(dtype=np.uint64))

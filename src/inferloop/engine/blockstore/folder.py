"""Blocks on disk: one file each, written whole or not at all, checked when read.

    FOLDER/blocks-1/ab/abcd...64 hex digits...ef.kv
    magic (8 bytes), CRC-32 of key and content, length of the content, key (32 bytes), content

Any number of processes may share a folder. None of them locks anything: a file appears under its name by a rename, its
content follows from its name, and who finds it gone has not found it. Files are not forced to disk: what is lost with
the power is found damaged or missing, never wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inferloop.engine.schedule.keys import KEY_BYTES
from inferloop.engine.schedule.step import BlockData

_MAGIC = b"ilkvblk1"
_HEADER = struct.Struct(f"<8sIQ{KEY_BYTES}s")
_SUFFIX = ".kv"
_UNFINISHED = ".tmp"
_ABANDONED_AFTER_S = 600.0


class DamagedBlockError(Exception):
    """A file that is not what its name says. It has been removed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: its size with header, and when it was last written or used (seconds since the epoch)."""

    key: bytes
    path: Path
    num_bytes: int
    used_s: float


class BlockFolder:
    """The files. Thread-safe, as the file system is. Methods raise OSError when the system refuses."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder, for its owner only: keys and values tell a good deal of the text."""
        self._root = folder / "blocks-1"
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._numbers = itertools.count()

    def holds(self, key: bytes) -> bool:
        return self._path(key).exists()

    def read(self, key: bytes, num_bytes: int) -> BlockData | None:
        """The content of a block of `num_bytes`, which is thereby used now; None: it is not there.

        Raises DamagedBlockError for any other content, OSError when there is something that cannot be read.
        """
        path = self._path(key)
        data = np.empty(num_bytes, np.uint8)
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(_HEADER.size)
                num_read = file.readinto(data.data)
                ends = not file.read(1)
        except FileNotFoundError:
            return None
        if not ends or num_read != num_bytes or header != _header(key, data):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            raise DamagedBlockError(str(path))
        self.touch(key)
        return data

    def write(self, key: bytes, data: BlockData) -> int:
        """Returns the size of the file."""
        path = self._path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have emptied the folder
        unfinished = path.with_name(f".{path.stem}-{os.getpid()}-{next(self._numbers)}{_UNFINISHED}")
        try:
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                header = _header(key, data)
                num_written = file.write(header) + file.write(data.data)
                if num_written != len(header) + data.nbytes:
                    raise OSError("the disk took only a part of the block")
            unfinished.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        return num_written

    def touch(self, key: bytes) -> None:
        """Mark the block as used now, if it is there and ours to mark."""
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.utime(self._path(key))

    def entries(self, now_s: float) -> Iterator[Entry]:
        """Every block there is, in no order. Removes what writers that were killed have left."""
        for part in self._scan(self._root):
            for file in self._scan(Path(part.path)) if part.is_dir() else ():
                with contextlib.suppress(FileNotFoundError):
                    stat = file.stat()
                    if file.name.endswith(_UNFINISHED) and now_s - stat.st_mtime > _ABANDONED_AFTER_S:
                        with contextlib.suppress(PermissionError):  # somebody else's
                            Path(file.path).unlink()
                    key = _key_of(file.name)
                    if key is not None:
                        yield Entry(key, Path(file.path), stat.st_size, stat.st_mtime)

    def _scan(self, folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as found:
                return list(found)
        except FileNotFoundError:
            return []

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._root / name[:2] / f"{name}{_SUFFIX}"


def _header(key: bytes, data: BlockData) -> bytes:
    return _HEADER.pack(_MAGIC, zlib.crc32(data.data, zlib.crc32(key)), data.nbytes, key)


def _key_of(name: str) -> bytes | None:
    """None: not one of ours."""
    if not name.endswith(_SUFFIX) or len(name) != 2 * KEY_BYTES + len(_SUFFIX):
        return None
    try:
        return bytes.fromhex(name.removesuffix(_SUFFIX))
    except ValueError:
        return None

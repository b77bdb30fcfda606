"""Reading numbers from bytes that may lie: every read is checked against what is really there."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from inferloop.core.errors import ModelFileError

ALLOWED_TIMES, ANY_BYTES = 3, 1 << 20
"""What is read of a header may take so many times the file, and this much of any file, as Python objects."""


class BoundedReader:
    """A cursor over a mapped file, whose pieces are copies. Any read past the end raises ModelFileError naming the file
    and the field."""

    def __init__(self, buffer: mmap.mmap, file: Path) -> None:
        self.buffer, self.file, self.at, self._spent = buffer, file, 0, 0

    @property
    def remaining(self) -> int:
        return len(self.buffer) - self.at

    def spend(self, num_bytes: int, what: str) -> None:
        """Before objects are made that take about `num_bytes`: all together may take ALLOWED_TIMES the file."""
        self._spent += num_bytes
        if self._spent > ANY_BYTES + ALLOWED_TIMES * len(self.buffer):
            raise self.fail(f"{what} takes too much memory for a file of {len(self.buffer)} bytes")

    def fail(self, problem: str) -> ModelFileError:
        """An error to raise, with the file's name in front."""
        return ModelFileError(f"{self.file}: {problem}")

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.remaining:
            raise self.fail(
                f"truncated or damaged: {what} needs {num_bytes} bytes at offset {self.at}, "
                f"the file has {self.remaining} more"
            )

    def number(self, layout: struct.Struct, what: str) -> int | float | bool:
        self.need(layout.size, what)
        value: int | float | bool = layout.unpack_from(self.buffer, self.at)[0]
        self.at += layout.size
        return value

    def count(self, layout: struct.Struct, what: str, min_bytes_each: int) -> int:
        """A count of things that take at least `min_bytes_each` bytes; refused when so many cannot be there."""
        value = int(self.number(layout, what))
        if value * min_bytes_each > self.remaining:
            raise self.fail(f"{what} is {value}, more than the file can hold")
        return value

    def take(self, num_bytes: int, what: str) -> bytes:
        self.need(num_bytes, what)
        piece = self.buffer[self.at : self.at + num_bytes]
        self.at += num_bytes
        return piece

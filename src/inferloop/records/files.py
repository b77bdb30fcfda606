"""Writing that survives a kill and a full disk: whole files appear at once, appended lines are whole or absent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from inferloop.core.errors import RecordWriteError

Opener = Callable[[Path, str], BinaryIO]
"""(path, mode) -> an unbuffered binary file. Injected so that a full disk can be played in a test."""


def open_unbuffered(path: Path, mode: str) -> BinaryIO:
    """Every write reaches the operating system at once, so a killed process loses nothing it had written."""
    return cast(BinaryIO, path.open(mode, buffering=0))


def write_atomic(path: Path, data: bytes, opener: Opener = open_unbuffered) -> None:
    """Replace `path` by `data`: readers see the old file or the new one, never a part. Raises RecordWriteError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with opener(temporary, "wb") as file:
            _write_all(file, data)
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _write_error(path, error) from error


class LineFile:
    """Appends whole lines. One writer. A line that does not fit is taken back, so the file never holds a part of it."""

    def __init__(self, path: Path, opener: Opener = open_unbuffered) -> None:
        self._path = path
        try:
            self._file: BinaryIO | None = opener(path, "ab")
        except OSError as error:
            raise _write_error(path, error) from error
        self._size = path.stat().st_size
        self.num_lines = 0

    def append(self, line: bytes) -> None:
        """`line` without its newline. Raises RecordWriteError; the file is then as it was before."""
        assert b"\n" not in line, "one record, one line"
        if self._file is None:
            raise RecordWriteError(f"{self._path} is closed")
        try:
            _write_all(self._file, line + b"\n")
        except OSError as error:
            try:
                self._file.truncate(self._size)
            except OSError:
                self.close()  # appending after a torn line would damage the next record too
            raise _write_error(self._path, error) from error
        self._size += len(line) + 1
        self.num_lines += 1

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
            with contextlib.suppress(OSError):
                file.close()


def whole_lines(path: Path) -> tuple[list[bytes], bool]:
    """(complete lines, whether a torn one follows). No file: no lines."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], False
    *lines, rest = data.split(b"\n")
    return lines, bool(rest)


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = file.write(view)  # a raw file may take only a part, above all on a disk that is filling up
        view = view[written:]


def _write_error(path: Path, error: OSError) -> RecordWriteError:
    reason = error.strerror or str(error)
    return RecordWriteError(f"cannot write {path}: {reason}", fix="Free some space or choose another --runs-dir.")

"""Where events go. The caller never waits: a full queue or a full disk costs events, which are counted, never time."""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from inferloop.core.errors import UsageError
from inferloop.records.event import Content, GatewayEvent, ReplicaEvent

Record = ReplicaEvent | GatewayEvent | Content
_MAX_BATCH = 256


class Sink(Protocol):
    """Takes finished records. `write` returns at once and never raises for what happens to the record later."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None:
        """Write out what is queued and let go of the file. Idempotent."""
        ...


class DropSink:
    """For a service that keeps no events."""

    def write(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass


class RawFile(Protocol):
    """What the writer needs of an unbuffered file; io.FileIO is one."""

    def write(self, data: bytes, /) -> int | None: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def truncate(self, size: int, /) -> int: ...

    def close(self) -> None: ...


def _open_raw(path: Path) -> RawFile:
    """Open for append by exactly one process, drop the torn last line that a killed process may have left."""
    file = open(path, "a+b", buffering=0, opener=lambda p, flags: os.open(p, flags, 0o600))  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(f"{path}: another process is writing this file; give each replica its own") from None
    file.truncate(_end_of_last_line(path))
    return file


def _end_of_last_line(path: Path) -> int:
    """Offset just past the last newline."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
    return 0


class JsonlSink:
    """One JSON line per record, appended by one writer thread. Lines are whole or absent, also when the disk fills.

    Every batch goes to the kernel as soon as the writer has it (no buffer of our own), so a killed process loses only
    what was still queued.
    `num_written` and `num_lost` only grow; lost are those that met a full queue or a file system that refused them,
    or that JSON cannot hold.
    Raises UsageError when the file cannot be opened or another process writes it.
    """

    def __init__(self, path: Path, *, capacity: int = 16384, opener: Callable[[Path], RawFile] = _open_raw) -> None:
        self.path = path
        self.num_written = 0
        self._lost_queue = self._lost_disk = self._lost_unfit = 0
        self._queue: queue.Queue[Record | None] = queue.Queue(capacity)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = opener(path)
            self._size = self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise UsageError(f"cannot write events to {path}: {error.strerror or error}") from error
        self._torn = False
        self._closed = False
        self._encoder = msgspec.json.Encoder()
        self._thread = threading.Thread(target=self._run, name="inferloop-sink", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        return self._lost_queue + self._lost_disk + self._lost_unfit

    def write(self, record: Record) -> None:
        if self._closed:
            self._lost_queue += 1
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._lost_queue += 1

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        closing = False
        while not closing:
            batch = [self._queue.get()]
            while len(batch) < _MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            closing = None in batch
            lines = [line for record in batch if record is not None and (line := self._line(record))]
            if lines:
                self._append(lines)

    def _line(self, record: Record) -> bytes:
        """Empty, and counted, for a record that JSON cannot hold: one of them must not cost all that come after it."""
        try:
            return self._encoder.encode(record) + b"\n"
        except (UnicodeError, ValueError, TypeError, OverflowError):
            self._lost_unfit += 1
            return b""

    def _append(self, lines: list[bytes]) -> None:
        """Write whole lines; what does not fit is cut back to the last whole line and counted as lost."""
        data, start = b"".join(lines), self._size
        num_done = 0
        try:
            if self._torn:
                self._file.truncate(start)
                self._torn = False
            while num_done < len(data):
                num_done += self._file.write(data[num_done:]) or 0
        except OSError:
            self._keep_whole_lines(lines, start, num_done)
            return
        self._size = start + len(data)
        self.num_written += len(lines)

    def _keep_whole_lines(self, lines: list[bytes], start: int, num_done: int) -> None:
        num_whole, size = 0, start
        for line in lines:
            if size + len(line) > start + num_done:
                break
            size += len(line)
            num_whole += 1
        self._size = size
        self.num_written += num_whole
        self._lost_disk += len(lines) - num_whole
        try:
            self._file.truncate(size)
        except OSError:
            self._torn = True  # cut again before the next line

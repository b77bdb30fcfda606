"""The folder of batch jobs: files by id, the database beside them, one server at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from inferloop.core.errors import UsageError


class Folder:
    """Held from construction to `close`, and given back by the kernel when the process dies.

    Raises UsageError when the folder cannot be used, or another server holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = path / "files"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # people's texts lie here
            self._files.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"--batch-dir {path} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(f"--batch-dir {path}: another server is using it; give each its own") from None
        self._open = True

    @property
    def database(self) -> Path:
        return self.path / "batches.sqlite"

    def file(self, file_id: str) -> Path:
        """`file_id` must be one of ours."""
        return self._files / file_id

    def partial(self, file_id: str) -> Path:
        """Where a file is written until it is whole."""
        return self._files / f"{file_id}.partial"

    def make_whole(self, file_id: str) -> None:
        """The partial file, synced by its writer, becomes the file; durable on return."""
        self.partial(file_id).rename(self.file(file_id))
        folder = os.open(self._files, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, file_id: str) -> None:
        for path in (self.file(file_id), self.partial(file_id)):
            path.unlink(missing_ok=True)

    def remove_others(self, known: Iterable[str]) -> None:
        """What a killed server left of files that it never made known."""
        kept = set(known)
        for path in self._files.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Idempotent."""
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):
                os.close(self._lock)

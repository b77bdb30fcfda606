"""The files that a batch leaves: its answers, and what failed or never ran, both in the order of the input."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import BinaryIO, ParamSpec, TypeVar

from inferloop.serve.batch.desk import Desk
from inferloop.serve.batch.folder import Folder
from inferloop.serve.batch.records import BatchRecord, FileRecord
from inferloop.serve.batch.row import RowError, line_of
from inferloop.serve.batch.wire import Status

P = ParamSpec("P")
R = TypeVar("R")

_CHUNK_BYTES = 4 << 20
"""About what is held in memory of answers at a time, or one of them."""
_NEVER_RAN: dict[Status, RowError] = {
    "expired": RowError(code="batch_expired", message="The completion window ended before this request was answered"),
    "cancelled": RowError(code="batch_cancelled", message="The batch was cancelled before this request was answered"),
}


async def write_output(
    desk: Desk, folder: Folder, batch: BatchRecord, status: Status, at_s: int
) -> tuple[FileRecord | None, FileRecord | None]:
    """(output file, error file), each None when it would be empty. They are whole and durable on return, and known to
    nobody yet. Written again they have the same ids, so that one try leaves nothing beside the next. Raises OSError,
    sqlite3.Error."""
    output, errors = _Writer(folder, batch.id, "output"), _Writer(folder, batch.id, "error")
    try:
        after = 0
        while chunk := await desk.ask(desk.store.answers, batch.id, after=after, max_bytes=_CHUNK_BYTES):
            after = chunk[-1][0]
            good: list[bytes] = []
            bad: list[bytes] = []
            for _, custom_id, state, line in chunk:
                if line is None:
                    bad.append(line_of(custom_id, None, _NEVER_RAN[status]))
                else:
                    (good if state == "completed" else bad).append(line)
            await _in_thread(output.write, good)
            await _in_thread(errors.write, bad)
        return await _in_thread(output.close, at_s), await _in_thread(errors.close, at_s)
    except BaseException:
        output.drop()
        errors.drop()
        raise


async def _in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Cancelled, it waits for the thread all the same, which could otherwise make a file after `drop`."""
    work = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        work.exception()  # nobody else asks for it
        raise


class _Writer:
    """One file, created with its first line."""

    def __init__(self, folder: Folder, batch_id: str, kind: str) -> None:
        self._folder, self._filename = folder, f"{batch_id}_{kind}.jsonl"
        self._id = f"file-{batch_id.removeprefix('batch-')}-{kind}"
        self._file: BinaryIO | None = None
        self._num_bytes = 0

    def write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._file is None:
            self._file = self._folder.partial(self._id).open("wb")
        self._num_bytes += self._file.write(b"".join(line + b"\n" for line in lines))

    def close(self, at_s: int) -> FileRecord | None:
        if self._file is None:
            return None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._folder.make_whole(self._id)
        return FileRecord(self._id, "batch_output", self._filename, self._num_bytes, at_s)

    def drop(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take does not fit now either
                self._file.close()
            self._folder.remove(self._id)

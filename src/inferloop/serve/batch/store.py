"""The database of batch jobs. A row's answer is either recorded, with the counts that include it, or the row was never
answered: so a row runs again exactly when its answer is not known.

SQLite in WAL mode with synchronous=FULL: what a client was told (this file is here, this batch exists, that many rows
are done) is still true after a power cut. Answers are recorded several to a transaction, so the price is one sync for
all that ended during the last one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from inferloop.core.errors import UsageError
from inferloop.serve.batch.input import Row
from inferloop.serve.batch.records import Answer, BatchRecord, FileRecord, RowState, Tokens
from inferloop.serve.batch.wire import UNFINISHED, LineError, Status

_VERSION = 2
_SCHEMA = """
CREATE TABLE files (
  seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL,
  num_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL
);
CREATE TABLE batches (
  seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, model TEXT NOT NULL, endpoint TEXT NOT NULL,
  input_file_id TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
  metadata TEXT NOT NULL, output_file_id TEXT, error_file_id TEXT, errors TEXT NOT NULL, stamps TEXT NOT NULL,
  num_rows INTEGER NOT NULL, num_completed INTEGER NOT NULL, num_failed INTEGER NOT NULL,
  num_input INTEGER NOT NULL, num_cached INTEGER NOT NULL, num_output INTEGER NOT NULL
);
CREATE TABLE rows (
  batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, "offset" INTEGER NOT NULL,
  length INTEGER NOT NULL, num_choices INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'pending', line BLOB,
  PRIMARY KEY (batch_id, number)
) WITHOUT ROWID;
"""
_FILE = "id, purpose, filename, num_bytes, created_at"
_BATCH = (
    "id, model, endpoint, input_file_id, status, created_at, expires_at, metadata, output_file_id, error_file_id, "
    "errors, stamps, num_rows, num_completed, num_failed, num_input, num_cached, num_output"
)
_ROW_BYTES = 1024
"""More than a row without an answer takes in memory."""
_ROW = 'number, custom_id, "offset", length, num_choices'


class Store:
    """Synchronous; one thread at a time. Every method is one transaction. Raises sqlite3.Error when the disk fails.

    Opening raises UsageError for a file that is no database of ours.
    """

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")
        except sqlite3.Error as error:
            self._db.close()
            raise UsageError(f"{path}: not a database of batch jobs: {error}") from None
        if version not in (0, _VERSION):
            self._db.close()
            raise UsageError(f"{path}: written by another version of inferloop (schema {version})")

    def close(self) -> None:
        self._db.close()

    # files

    def add_file(self, file: FileRecord) -> None:
        with self._db:
            self._add_file(file)

    def file(self, file_id: str) -> FileRecord | None:
        found = self._db.execute(f"SELECT {_FILE} FROM files WHERE id = ?", (file_id,)).fetchone()
        return FileRecord(*found) if found else None

    def files(self, *, purpose: str | None, after: str | None, limit: int, newest_first: bool) -> list[FileRecord]:
        """After the file `after`; an unknown one has nothing after it."""
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        rows = self._db.execute(
            f"SELECT {_FILE} FROM files WHERE (?1 IS NULL OR purpose = ?1) AND "
            f"(?2 IS NULL OR seq {beyond} (SELECT seq FROM files WHERE id = ?2)) ORDER BY seq {order} LIMIT ?3",
            (purpose, after, limit),
        )
        return [FileRecord(*row) for row in rows]

    def file_ids(self) -> list[str]:
        return [file_id for (file_id,) in self._db.execute("SELECT id FROM files")]

    def remove_file(self, file_id: str) -> str | None:
        """None when it is gone; else the unfinished batch that needs it."""
        marks = ", ".join("?" * len(UNFINISHED))
        with self._db:
            user = self._db.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({marks})", (file_id, *UNFINISHED)
            ).fetchone()
            if user is None:
                self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        return None if user is None else str(user[0])

    # batches

    def add_batch(self, batch: BatchRecord) -> bool:
        """False when its input file is not there any more."""
        with self._db:
            if self.file(batch.input_file_id) is None:
                return False
            values = (
                batch.id, batch.model, batch.endpoint, batch.input_file_id, batch.status, batch.created_at,
                batch.expires_at, _json(batch.metadata), None, None, "[]", "{}", 0, 0, 0, 0, 0, 0,
            )  # fmt: skip
            self._db.execute(f"INSERT INTO batches ({_BATCH}) VALUES ({', '.join('?' * len(values))})", values)
        return True

    def batch(self, batch_id: str) -> BatchRecord | None:
        found = self._db.execute(f"SELECT {_BATCH} FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return _batch(found) if found else None

    def batches(self, *, after: str | None, limit: int) -> list[BatchRecord]:
        """Newest first."""
        rows = self._db.execute(
            f"SELECT {_BATCH} FROM batches WHERE ?1 IS NULL OR seq < (SELECT seq FROM batches WHERE id = ?1) "
            "ORDER BY seq DESC LIMIT ?2",
            (after, limit),
        )
        return [_batch(row) for row in rows]

    def unfinished(self) -> list[BatchRecord]:
        """Oldest first."""
        marks = ", ".join("?" * len(UNFINISHED))
        rows = self._db.execute(f"SELECT {_BATCH} FROM batches WHERE status IN ({marks}) ORDER BY seq", UNFINISHED)
        return [_batch(row) for row in rows]

    def begin(self, batch_id: str, rows: Sequence[Row], at_s: int) -> bool:
        """The file was right: all its rows are to be answered. False when the batch is not being validated any more."""
        with self._db:
            if not self._move(batch_id, ("validating",), "in_progress", at_s):
                return False
            self._db.executemany(
                f"INSERT INTO rows (batch_id, {_ROW}) VALUES (?, ?, ?, ?, ?, ?)",
                ((batch_id, r.number, r.custom_id, r.offset, r.length, r.num_choices) for r in rows),
            )
            self._db.execute("UPDATE batches SET num_rows = ? WHERE id = ?", (len(rows), batch_id))
        return True

    def refuse(self, batch_id: str, errors: Sequence[LineError], at_s: int) -> bool:
        """The file was wrong. False as with `begin`."""
        with self._db:
            if not self._move(batch_id, ("validating",), "failed", at_s):
                return False
            self._db.execute("UPDATE batches SET errors = ? WHERE id = ?", (_json(errors), batch_id))
        return True

    def cancel(self, batch_id: str, at_s: int) -> bool:
        """False when it is too late."""
        with self._db:
            return self._move(batch_id, ("validating", "in_progress"), "cancelling", at_s)

    def finalize(self, batch_id: str, at_s: int) -> bool:
        """All rows have their answer. False when the batch was cancelled first."""
        with self._db:
            return self._move(batch_id, ("in_progress", "finalizing"), "finalizing", at_s)

    def finish(
        self, batch_id: str, status: Status, output: FileRecord | None, errors: FileRecord | None, at_s: int
    ) -> None:
        """The last step: its files appear, its rows, which are in them, go."""
        with self._db:
            moved = self._move(batch_id, UNFINISHED, status, at_s)
            assert moved, "a batch ends once"
            for file in (output, errors):
                if file is not None:
                    self._add_file(file)
            self._db.execute(
                "UPDATE batches SET output_file_id = ?, error_file_id = ? WHERE id = ?",
                (output and output.id, errors and errors.id, batch_id),
            )
            self._db.execute("DELETE FROM rows WHERE batch_id = ?", (batch_id,))

    # rows

    def pending(self, batch_id: str, *, after: int, limit: int) -> list[Row]:
        """Rows without an answer, from the line after `after` on."""
        rows = self._db.execute(
            f"SELECT {_ROW} FROM rows WHERE batch_id = ? AND number > ? AND state = 'pending' ORDER BY number LIMIT ?",
            (batch_id, after, limit),
        )
        return [Row(*row) for row in rows]

    def record(self, answers: Sequence[Answer]) -> None:
        """Together or not at all. An answer to a row that has one already, or whose batch has ended, changes
        nothing."""
        with self._db:
            for answer in answers:
                changed = self._db.execute(
                    "UPDATE rows SET state = ?, line = ? WHERE batch_id = ? AND number = ? AND state = 'pending'",
                    (answer.state, answer.line, answer.batch_id, answer.number),
                ).rowcount
                if changed:
                    tokens, completed = answer.tokens, int(answer.state == "completed")
                    self._db.execute(
                        "UPDATE batches SET num_completed = num_completed + ?, num_failed = num_failed + ?, "
                        "num_input = num_input + ?, num_cached = num_cached + ?, num_output = num_output + ? "
                        "WHERE id = ?",
                        (completed, 1 - completed, tokens.num_input, tokens.num_cached, tokens.num_output,
                         answer.batch_id),
                    )  # fmt: skip

    def answers(
        self, batch_id: str, *, after: int, max_bytes: int
    ) -> list[tuple[int, str, RowState | None, bytes | None]]:
        """(line, custom_id, state, what was recorded) in the order of the input; None twice for a row that was not
        answered. At least one, if there is any, and as many as begin within `max_bytes`."""
        rows = self._db.execute(
            "SELECT number, custom_id, NULLIF(state, 'pending'), line FROM rows WHERE batch_id = ? AND number > ? "
            "ORDER BY number",
            (batch_id, after),
        )
        found: list[tuple[int, str, RowState | None, bytes | None]] = []
        num_bytes = 0
        for row in rows:
            found.append(row)
            num_bytes += _ROW_BYTES + len(row[3] or b"")
            if num_bytes >= max_bytes:
                rows.close()
                break
        return found

    def _add_file(self, file: FileRecord) -> None:
        self._db.execute(
            f"INSERT INTO files ({_FILE}) VALUES (?, ?, ?, ?, ?)",
            (file.id, file.purpose, file.filename, file.num_bytes, file.created_at),
        )

    def _move(self, batch_id: str, before: Iterable[Status], status: Status, at_s: int) -> bool:
        """Change the status and stamp it, if the batch stands where it may; within the caller's transaction."""
        before = tuple(before)
        marks = ", ".join("?" * len(before))
        path = f"$.{status}"
        return (
            self._db.execute(
                f"UPDATE batches SET status = ?, stamps = json_set(stamps, ?, ?) WHERE id = ? AND status IN ({marks})",
                (status, path, at_s, batch_id, *before),
            ).rowcount
            == 1
        )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _batch(row: Sequence[Any]) -> BatchRecord:
    named: dict[str, Any] = dict(zip(_BATCH.split(", "), row, strict=True))
    tokens = Tokens(named.pop("num_input"), named.pop("num_cached"), named.pop("num_output"))
    named["metadata"] = msgspec.json.decode(named["metadata"], type=dict[str, str] | None)
    named["errors"] = msgspec.json.decode(named["errors"], type=tuple[LineError, ...])
    named["stamps"] = msgspec.json.decode(named["stamps"], type=dict[str, int])
    return BatchRecord(**named, tokens=tokens)

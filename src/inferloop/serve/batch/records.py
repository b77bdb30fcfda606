"""What is stored of files, batches and answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from inferloop.serve.batch.wire import LineError, Purpose, Status

RowState = Literal["completed", "failed"]


@dataclass(frozen=True, slots=True)
class FileRecord:
    id: str
    purpose: Purpose
    filename: str
    num_bytes: int
    created_at: int


@dataclass(frozen=True, slots=True)
class Tokens:
    num_input: int = 0
    num_cached: int = 0
    num_output: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one row: `line` is its whole line of the output or the error file, without the newline."""

    batch_id: str
    number: int
    state: RowState
    line: bytes
    tokens: Tokens = Tokens()


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """Times in seconds since the epoch. `stamps` says when each status was reached. `model` is the one that its server
    had."""

    id: str
    model: str
    endpoint: str
    input_file_id: str
    status: Status
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[LineError, ...] = ()
    stamps: dict[str, int] = field(default_factory=dict)
    num_rows: int = 0
    num_completed: int = 0
    num_failed: int = 0
    tokens: Tokens = Tokens()

    @property
    def num_left(self) -> int:
        return self.num_rows - self.num_completed - self.num_failed

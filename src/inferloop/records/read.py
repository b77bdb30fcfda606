"""Reading a run folder back, whatever state it was left in."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa

from inferloop.core.errors import RecordError
from inferloop.measure.timing import RequestTiming
from inferloop.records.bench import RequestRow, from_json_line, read_parquet
from inferloop.records.files import whole_lines
from inferloop.records.header import HEADER, LINES, PARQUET, SCHEMA_VERSION, STAGES, SUMMARY, RunHeader, Status


@dataclass(frozen=True, slots=True)
class StageEvent:
    """started | finished | failed | anything else a stage had to say."""

    stage: str
    event: str
    t_ns: int
    wall_ns: int
    detail: dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """A run as it lies on disk. `torn` says that a last line was cut off (and left out)."""

    path: Path
    header: RunHeader
    summary: dict[str, Any] | None
    stages: tuple[StageEvent, ...]
    torn: bool

    @property
    def status(self) -> Status:
        """As the header says, except that a run whose process is gone is interrupted, not running."""
        if self.header.status == "running" and not _alive(self.header):
            return "interrupted"
        return self.header.status

    @property
    def complete(self) -> bool:
        """Whether the run reached its end (its verdict may still be void)."""
        return self.header.status in ("complete", "void") and self.summary is not None

    @cached_property
    def rows(self) -> tuple[RequestRow, ...]:
        """Every request recorded, in the order in which they ended. Read on first use; raises RecordError."""
        sealed = self.path / PARQUET
        if sealed.exists():
            try:
                return tuple(read_parquet(sealed))
            except (OSError, pa.ArrowInvalid, KeyError) as error:
                raise RecordError(f"{sealed}: not a request table: {error}") from error
        rows = []
        for number, line in enumerate(whole_lines(self.path / LINES)[0], 1):
            try:
                rows.append(from_json_line(line))
            except (ValueError, KeyError, TypeError) as error:
                raise RecordError(f"{self.path / LINES}:{number}: not a request: {error}") from error
        return tuple(rows)

    @property
    def timings(self) -> tuple[RequestTiming, ...]:
        """The measured requests, warm-up left out."""
        return tuple(row.timing for row in self.rows if not row.warmup)

    def points(self) -> dict[str, tuple[RequestTiming, ...]]:
        """The measured requests by bench point, in the order in which the points ran."""
        grouped: dict[str, list[RequestTiming]] = {}
        for row in self.rows:
            if not row.warmup:
                grouped.setdefault(row.point, []).append(row.timing)
        return {name: tuple(timings) for name, timings in grouped.items()}


def open_run(path: Path | str) -> RunRecord:
    """Read a run folder (or its run.json). Raises RecordError when it is not one, or one of a newer inferloop."""
    folder = Path(path)
    if folder.name == HEADER:
        folder = folder.parent
    header = _header(folder / HEADER)
    stage_lines, stages_torn = whole_lines(folder / STAGES)
    _, rows_torn = whole_lines(folder / LINES)
    stages = []
    for number, line in enumerate(stage_lines, 1):
        try:
            stages.append(msgspec.json.decode(line, type=StageEvent))
        except msgspec.DecodeError as error:
            raise RecordError(f"{folder / STAGES}:{number}: not a stage: {error}") from error
    return RunRecord(folder, header, _summary(folder / SUMMARY), tuple(stages), stages_torn or rows_torn)


def _summary(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RecordError(f"{file}: damaged: {error}") from error
    if not isinstance(value, dict):
        raise RecordError(f"{file}: not a summary: it holds a {type(value).__name__}")
    return value


def _header(file: Path) -> RunHeader:
    try:
        value = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        why = f"is not a run folder: it has no {HEADER}" if file.parent.exists() else "does not exist"
        raise RecordError(f"{file.parent} {why}") from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{file}: damaged: {error}") from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
        raise RecordError(f"{file}: schema version {version!r}; this inferloop reads 1 to {SCHEMA_VERSION}")
    try:
        return msgspec.convert(value, RunHeader)
    except msgspec.ValidationError as error:
        raise RecordError(f"{file}: damaged: {error}") from error


def _alive(header: RunHeader) -> bool:
    if header.host != os.uname().nodename:
        return True  # cannot be seen from here; believe the header
    try:
        started_s = psutil.Process(header.pid).create_time()
    except psutil.Error:
        return False
    return abs(started_s - header.process_started_s) < 1.0  # else the pid was given to another process

"""Our own records: the requests of a run folder, and events of replicas exported as JSON lines or Parquet.

Both hold lengths and times and no text. Of events only first attempts count: a retry is not one more user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inferloop.contract.trace.lines import json_lines
from inferloop.contract.trace.record import CountTokens, Recorded, number_of, tokens_of
from inferloop.core.errors import TraceError
from inferloop.core.units import NS_PER_S

RUN_FIELDS = ("t_send", "num_input_tokens", "num_output_tokens")
EVENT_FIELDS = ("t_wall_ns", "num_input_tokens", "num_output_tokens")
REQUESTS = "requests.parquet"
_RUN_EXTRAS = ("t_end", "t_intended", "session", "traffic_class", "warmup", "point")
_EVENT_EXTRAS = ("traffic_class", "attempt")


def read_run(path: Path, count: CountTokens) -> Iterator[Recorded]:
    """The measured requests, at the instants they were meant for (or sent at, in a closed loop). Raises TraceError."""
    file = path / REQUESTS if path.is_dir() else path
    seconds = _Seconds()
    for number, row in _parquet_rows(file, RUN_FIELDS, _RUN_EXTRAS):
        if row.get("warmup"):
            continue
        key = "t_intended" if row.get("t_intended") is not None else "t_send"
        session = row.get("session")
        yield Recorded(
            seconds.of(file, number, row, key),
            tokens_of(file, number, row, RUN_FIELDS[1]),
            tokens_of(file, number, row, RUN_FIELDS[2]),
            session=None if session is None else f"{row.get('point')} {session}",
            traffic_class=str(row.get("traffic_class") or "default"),
            end_s=None if row.get("t_end") is None else seconds.of(file, number, row, "t_end"),
        )


def read_events(path: Path, count: CountTokens) -> Iterator[Recorded]:
    """Raises TraceError; rows of gateways hold no lengths."""
    is_parquet = path.suffix == ".parquet"
    rows = _parquet_rows(path, EVENT_FIELDS, _EVENT_EXTRAS) if is_parquet else json_lines(path)
    seconds = _Seconds()
    for number, row in rows:
        if (row.get("attempt") or 1) != 1:
            continue
        yield Recorded(
            seconds.of(path, number, row, "t_wall_ns"),
            tokens_of(path, number, row, EVENT_FIELDS[1]),
            tokens_of(path, number, row, EVENT_FIELDS[2]),
            traffic_class=str(row.get("traffic_class") or "default"),
        )


class _Seconds:
    """Seconds after the first instant. Nanoseconds since 1970 are more than a float can tell apart."""

    def __init__(self) -> None:
        self._first_ns: int | None = None

    def of(self, path: Path, line: int, row: Mapping[str, Any], key: str) -> float:
        """Raises TraceError."""
        number, told = number_of(path, line, row, key), row[key]
        at_ns = told if isinstance(told, int) else round(number)
        self._first_ns = at_ns if self._first_ns is None else self._first_ns
        return (at_ns - self._first_ns) / NS_PER_S


def parquet_columns(path: Path) -> list[str]:
    """Raises TraceError for a file that is no Parquet."""
    import pyarrow as pa  # late: reading a contract must not load it
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path).names)
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"is no readable Parquet file: {error}", file=str(path)) from error


def _parquet_rows(
    path: Path, needed: tuple[str, ...], extras: tuple[str, ...]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(row from 1, values), some thousand rows in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = parquet_columns(path)
    missing = [name for name in needed if name not in names]
    if missing:
        raise TraceError(f"has no column {missing[0]}", file=str(path))
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(4096, columns=[n for n in (*needed, *extras) if n in names]):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"cannot be read: {error}", file=str(path), line=number) from error

"""Azure LLM inference traces, 2023 and 2024: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

https://github.com/Azure/AzurePublicDataset. Times are dates; what prompts share is not told.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from inferloop.contract.trace.lines import csv_rows
from inferloop.contract.trace.record import CountTokens, Recorded, tokens_of
from inferloop.core.errors import TraceError

FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path, count: CountTokens) -> Iterator[Recorded]:
    """Raises TraceError."""
    start: datetime | None = None
    for line, row in csv_rows(path, FIELDS):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
            start = at if start is None else start
            at_s = (at - start).total_seconds()
        except (ValueError, TypeError) as error:
            problem = f"must be a date and time like the others, not {row['TIMESTAMP'][:60]!r}"
            raise TraceError(problem, file=str(path), line=line, key="TIMESTAMP") from error
        yield Recorded(at_s, tokens_of(path, line, row, FIELDS[1]), tokens_of(path, line, row, FIELDS[2]))

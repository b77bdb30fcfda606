"""BurstGPT: CSV with Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens, Log Type.

https://github.com/HPMLL/BurstGPT. Failed requests have no response tokens. Later releases have a Session ID,
and with Elapsed time the seconds until the answer was complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from inferloop.contract.trace.lines import csv_rows
from inferloop.contract.trace.record import CountTokens, Recorded, number_of, tokens_of

FIELDS = ("Timestamp", "Request tokens", "Response tokens")
_SESSION = ("Session ID", "SessionID")
_ELAPSED = "Elapsed time"


def read(path: Path, count: CountTokens) -> Iterator[Recorded]:
    """Raises TraceError."""
    for line, row in csv_rows(path, FIELDS):
        at_s = number_of(path, line, row, "Timestamp")
        yield Recorded(
            at_s,
            tokens_of(path, line, row, FIELDS[1]),
            tokens_of(path, line, row, FIELDS[2]),
            session=next((row[name] for name in _SESSION if row.get(name)), None),
            end_s=at_s + number_of(path, line, row, _ELAPSED) if row.get(_ELAPSED) else None,
        )

"""Which format a trace has, told by its fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from inferloop.contract.trace import azure, burstgpt, mooncake, own, sharegpt
from inferloop.contract.trace.lines import lines_of
from inferloop.contract.trace.record import CountTokens, Recorded
from inferloop.core.errors import TraceError, UsageError

Reader = Callable[[Path, CountTokens], Iterator[Recorded]]
READERS: dict[str, Reader] = {
    "azure": azure.read,
    "burstgpt": burstgpt.read,
    "mooncake": mooncake.read,
    "sharegpt": sharegpt.read,
    "run": own.read_run,
    "events": own.read_events,
}
FORMATS = tuple(READERS)


def detect(path: Path) -> str:
    """One of FORMATS. Raises UsageError when there is no such file, TraceError when the fields are of none of them."""
    if path.is_dir():
        if (path / own.REQUESTS).is_file():
            return "run"
        raise TraceError(f"holds no {own.REQUESTS}, so it is no finished run", file=str(path))
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    if path.suffix == ".parquet":
        return _by_fields(path, 1, own.parquet_columns(path))
    number, first = next(((n, line) for n, line in lines_of(path) if line.strip()), (1, ""))
    text = first.strip()
    if text.startswith("["):
        return "sharegpt"
    if not text.startswith("{"):
        return _by_fields(path, number, [cell.strip() for cell in text.split(",")])
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"is no JSON: {error}", file=str(path), line=number) from error
    return _by_fields(path, number, list(value))


def _by_fields(path: Path, line: int, found: list[str]) -> str:
    known = {
        "azure": azure.FIELDS,
        "burstgpt": burstgpt.FIELDS,
        "mooncake": mooncake.FIELDS,
        "run": own.RUN_FIELDS,
        "events": own.EVENT_FIELDS,
    }
    for name, fields in known.items():
        if set(fields) <= set(found):
            return name
    shown = ", ".join(found)[:120] or "nothing"
    hint = "; ".join(f"{name}: {', '.join(fields)}" for name, fields in known.items())
    raise TraceError(f"has the fields of no known trace: {shown}", file=str(path), line=line, hint=hint)

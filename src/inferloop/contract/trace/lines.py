"""Reading traces piece by piece: lines, CSV rows, JSON lines and JSON arrays, with line numbers and bounded memory."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inferloop.core.errors import TraceError, UsageError

MAX_LINE = 8 << 20
"""Bytes, also of one element of a JSON array."""
_PIECE = 1 << 16
_BLANK = re.compile(r"[ \t\r\n,]*")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line without its end). Raises UsageError, TraceError."""
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise TraceError(f"is longer than {MAX_LINE >> 20} MiB", file=str(path), line=number)
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.rstrip("\r\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError("is not UTF-8 text", file=str(path), line=number) from error


def csv_rows(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, cells by the header's names); `needed` must be among these."""
    header: list[str] | None = None
    for number, line in lines_of(path):
        if not line.strip():
            continue
        try:
            cells = next(csv.reader([line]))
        except csv.Error as error:
            raise TraceError(f"is no CSV: {error}", file=str(path), line=number) from error
        if header is None:
            header = [cell.strip() for cell in cells]
            missing = [name for name in needed if name not in header]
            if missing:
                raise TraceError(f"has no column {missing[0]}", file=str(path), line=number)
            continue
        if len(cells) != len(header):
            problem = f"has {len(cells)} cells where the header has {len(header)}"
            raise TraceError(problem, file=str(path), line=number)
        yield number, dict(zip(header, (cell.strip() for cell in cells), strict=True))
    if header is None:
        raise TraceError("is empty", file=str(path))


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object)."""
    for number, line in lines_of(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"is no JSON: {error}", file=str(path), line=number) from error
        if not isinstance(value, dict):
            raise TraceError("must be an object", file=str(path), line=number)
        yield number, value


def json_array(path: Path, *, piece: int = _PIECE) -> Iterator[tuple[int, Any]]:
    """(line where it begins, element) of a file that is one JSON array; one element at a time is in memory, and
    `piece` characters more."""
    decoder = json.JSONDecoder()
    text, at, line, begun = "", 0, 1, False
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            while True:
                blank = _BLANK.match(text, at)
                assert blank is not None, "it matches nothing too"
                line, at = line + text.count("\n", at, blank.end()), blank.end()
                if not begun and text.startswith("[", at):
                    begun, at = True, at + 1
                    continue
                if begun and text.startswith("]", at):
                    return
                value, end = _element(decoder, text, at) if begun else (None, None)
                if end is not None:
                    yield line, value
                    line, at = line + text.count("\n", at, end), end
                    continue
                more = file.read(max(piece, len(text) - at))
                if not more or len(text) - at > MAX_LINE or (not begun and at < len(text)):
                    problem = "is no JSON, or ends in the middle" if begun else "must be a list of conversations"
                    raise TraceError(problem, file=str(path), line=line)
                text, at = text[at:] + more, 0
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError("is not UTF-8 text", file=str(path), line=line) from error
    except RecursionError as error:
        raise TraceError("is nested too deeply", file=str(path), line=line) from error


def _element(decoder: json.JSONDecoder, text: str, at: int) -> tuple[Any, int | None]:
    """The element that begins at `at` and where it ends; None when it is not there whole, as a number at the end of
    the text may not be."""
    try:
        value, end = decoder.raw_decode(text, at)
    except ValueError:
        return None, None
    return (value, end) if end < len(text) or text[end - 1] in '}]"' else (None, None)

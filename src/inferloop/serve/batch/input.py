"""The input of a batch: one request per line, checked completely before any of them is answered."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from inferloop.core.errors import RequestError
from inferloop.serve.batch.wire import LineError
from inferloop.serve.decode import decode_body

MAX_ROWS = 50_000
MAX_ERRORS = 1000
"""That many are listed one by one; the rest is counted."""
_ENVELOPE_BYTES = 4096
"""What a line may have around its body."""
_REST_EVERY, _REST_S = 16, 0.001
"""Reading a large file takes seconds of pure Python; other threads must get their turn more often than the
interpreter would give it to them."""


class InputRow(Struct, forbid_unknown_fields=True, kw_only=True):
    """One line of the input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: Raw


@dataclass(frozen=True, slots=True)
class Row:
    """Where one request stands in the input file. `number` is its line, from 1; `num_choices` the places that it takes
    in the engine."""

    number: int
    custom_id: str
    offset: int
    length: int
    num_choices: int


@dataclass(slots=True)
class Checked:
    """`rows` counts only when there are no errors."""

    rows: list[Row] = field(default_factory=list)
    errors: list[LineError] = field(default_factory=list)
    num_unlisted: int = 0

    def add(self, error: LineError) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(error)
        else:
            self.num_unlisted += 1

    def all_errors(self) -> list[LineError]:
        """Those listed, and how many are not."""
        if not self.num_unlisted:
            return self.errors
        return [*self.errors, LineError(code="more_errors", message=f"{self.num_unlisted} more lines are wrong")]


def check_rows(
    path: Path,
    endpoint: str,
    check_body: Callable[[bytes], int],
    *,
    max_body_bytes: int,
    rest: Callable[[float], None] = time.sleep,
) -> Checked:
    """Read the whole file, a line at a time. `check_body` gives the number of choices that a body asks for, or raises
    RequestError. Empty lines are skipped. Raises OSError, and what `rest` raises to end it."""
    checked = Checked()
    line_of: dict[str, int] = {}
    limit = max_body_bytes + _ENVELOPE_BYTES
    offset = 0
    with path.open("rb") as file:
        number = 0
        while line := file.readline(limit + 1):
            number += 1
            start, offset = offset, offset + len(line)
            if number == 1 and line.startswith(codecs.BOM_UTF8):  # some editors begin files with it
                start, line = start + len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
            if len(line) > limit:
                checked.add(LineError(code="line_too_long", message=f"The line exceeds {limit} bytes", line=number))
                while line and not line.endswith(b"\n"):
                    line = file.readline(limit)
                    offset += len(line)
                continue
            if not line.strip():
                continue
            if len(checked.rows) + len(checked.errors) + checked.num_unlisted >= MAX_ROWS:
                message = f"A batch takes at most {MAX_ROWS} requests; the rest was not read"
                checked.add(LineError(code="too_many_rows", message=message, line=number))
                break
            try:
                row = decode_body(line, InputRow, what="The line")
                num_choices = _check_row(row, endpoint, line_of, number, check_body)
            except RequestError as error:
                checked.add(LineError(code=error.code, message=error.message, line=number, param=error.param))
            else:
                checked.rows.append(Row(number, row.custom_id, start, len(line), num_choices))
            if number % _REST_EVERY == 0:
                rest(_REST_S)
    if not checked.rows and not checked.errors:
        checked.add(LineError(code="empty_file", message="The file has no requests"))
    return checked


def _check_row(
    row: InputRow, endpoint: str, line_of: dict[str, int], number: int, check_body: Callable[[bytes], int]
) -> int:
    if (first := line_of.setdefault(row.custom_id, number)) != number:
        message = f"custom_id {row.custom_id!r} stands in line {first} already"
        raise RequestError(message, param="custom_id", code="duplicate_custom_id")
    if row.url != endpoint:
        message = f"url is {row.url!r}, the batch is for {endpoint!r}"
        raise RequestError(message, param="url", code="mismatched_url")
    return check_body(bytes(row.body))


def read_body(path: Path, row: Row) -> bytes:
    """The body of a row that was checked before. Raises OSError."""
    with path.open("rb") as file:
        file.seek(row.offset)
        return bytes(msgspec.json.decode(file.read(row.length), type=InputRow).body)

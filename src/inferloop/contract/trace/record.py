"""What is kept of one recorded request, whatever the format. No text passes here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferloop.core.errors import TraceError

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 10_000_000
"""Of a prompt or an answer: the longest context of any model. Some 60 MB are then sent of it."""
BLOCK_TOKENS = 512
CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Recorded:
    """`at_s` counts from any zero; None in a trace without times. `blocks` name the blocks of `block_tokens` that the
    prompt begins with: equal names, equal tokens. Requests of one `session` are turns that repeat what was said before.
    `end_s`, on the clock of `at_s`, is when the answer was complete; None where that is not told."""

    at_s: float | None
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: str | None = None
    traffic_class: str = "default"
    end_s: float | None = None
    block_tokens: int = BLOCK_TOKENS


def estimate_tokens(text: str) -> int:
    """Four bytes of UTF-8 are a token, for lack of the target's tokenizer."""
    return math.ceil(len(text.encode("utf-8", "replace")) / 4)


def tokens_of(path: Path, line: int, row: Mapping[str, Any], key: str) -> int:
    """A count of tokens, written as a number or as the text of one. Raises TraceError."""
    value = number_of(path, line, row, key)
    if value != int(value) or value > MAX_TOKENS:
        problem = f"must be a whole number of tokens, {MAX_TOKENS} at most, not {row[key]!r}"
        raise TraceError(problem, file=str(path), line=line, key=key)
    return int(value)


def number_of(path: Path, line: int, row: Mapping[str, Any], key: str) -> float:
    """A finite number of at least 0. Raises TraceError."""
    value = row.get(key)
    if value is None or value == "":
        raise TraceError("is missing", file=str(path), line=line, key=key)
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        shown = repr(value)
        raise TraceError(f"must be a number of at least 0, not {shown[:60]}", file=str(path), line=line, key=key)
    return number

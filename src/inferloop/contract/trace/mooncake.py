"""Mooncake: JSON lines with timestamp (milliseconds), input_length, output_length, hash_ids.

https://github.com/kvcache-ai/Mooncake. Each hash id names 512 tokens of the prompt and all before them (the last one
fewer), so equal ids at the beginnings of two prompts are a prefix that they share.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from inferloop.contract.trace.lines import json_lines
from inferloop.contract.trace.record import CountTokens, Recorded, number_of, tokens_of
from inferloop.core.errors import TraceError

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_MS_PER_S = 1000.0


def read(path: Path, count: CountTokens) -> Iterator[Recorded]:
    """Raises TraceError."""
    for line, row in json_lines(path):
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise TraceError("must be a list of whole numbers", file=str(path), line=line, key="hash_ids")
        yield Recorded(
            number_of(path, line, row, "timestamp") / _MS_PER_S,
            tokens_of(path, line, row, FIELDS[1]),
            tokens_of(path, line, row, FIELDS[2]),
            blocks=tuple(ids),
        )

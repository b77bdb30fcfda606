"""Mooncake: JSON lines with timestamp (milliseconds), input_length, output_length, hash_ids.

https://github.com/kvcache-ai/Mooncake. Each hash id names a block of the prompt and all before it (the last one may be
shorter), so equal ids at the beginnings of two prompts are a prefix that they share. Blocks have 512 tokens there;
other traces of this form have other sizes, which they do not tell, but the numbers of their ids do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from inferloop.contract.trace.lines import json_lines
from inferloop.contract.trace.record import BLOCK_TOKENS, CountTokens, Recorded, number_of, tokens_of
from inferloop.core.errors import TraceError

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_MS_PER_S = 1000.0
_SIZES = (BLOCK_TOKENS, *(1 << k for k in range(13, 2, -1) if 1 << k != BLOCK_TOKENS))
"""Most likely first; of several that fit, the largest of the others."""
_LOOK_AT = 1000


def read(path: Path, count: CountTokens) -> Iterator[Recorded]:
    """Raises TraceError."""
    rows = _rows(path)
    first = list(islice(rows, _LOOK_AT))
    size = _block_tokens([recorded for _, recorded in first])
    for line, recorded in chain(first, rows):
        if _has_too_many(recorded, size):
            problem = f"names {len(recorded.blocks)} blocks of {size} tokens for a prompt of {recorded.input_tokens}"
            raise TraceError(problem, file=str(path), line=line, key="hash_ids")
        yield recorded if size == BLOCK_TOKENS else replace(recorded, block_tokens=size)


def _rows(path: Path) -> Iterator[tuple[int, Recorded]]:
    for line, row in json_lines(path):
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise TraceError("must be a list of whole numbers", file=str(path), line=line, key="hash_ids")
        yield (
            line,
            Recorded(
                number_of(path, line, row, "timestamp") / _MS_PER_S,
                tokens_of(path, line, row, FIELDS[1]),
                tokens_of(path, line, row, FIELDS[2]),
                blocks=tuple(ids),
            ),
        )


def _block_tokens(found: Iterable[Recorded]) -> int:
    """The size with which all ids name the whole of their prompts and nothing beyond. Where there is none, or nothing
    to tell it by, not all is named, and blocks are taken for Mooncake's."""
    named = [r for r in found if r.blocks and r.input_tokens]
    for size in _SIZES if any(len(r.blocks) > 1 for r in named) else ():
        if all(-(-r.input_tokens // size) == len(r.blocks) for r in named):
            return size
    return BLOCK_TOKENS


def _has_too_many(recorded: Recorded, size: int) -> bool:
    return (len(recorded.blocks) - 1) * size >= recorded.input_tokens > 0

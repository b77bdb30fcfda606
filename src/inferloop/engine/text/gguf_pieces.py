"""The pieces of a vocabulary inside a GGUF file, before anything is known of how they are merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferloop.core.errors import ModelFileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of tokenizer.ggml.token_type."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Id i is written `tokens[i]` and is of type `types[i]`; `ids` finds the first of a text."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def of_type(self, wanted: int) -> list[str]:
        return [t for t, kind in zip(self.tokens, self.types, strict=True) if kind == wanted and t]


def read_pieces(metadata: Mapping[str, object], file: Path) -> Pieces:
    """Raises ModelFileError unless every id has a type and, unused ones aside, a text of its own."""
    tokens, types = read_list(metadata, file, "tokens", str), read_list(metadata, file, "token_type", int)
    if len(tokens) != len(types):
        raise ModelFileError(f"{file}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) < len(tokens):  # some appear twice
        ids = {}
        for i, token in enumerate(tokens):
            if ids.setdefault(token, i) != i and types[i] != UNUSED:
                raise ModelFileError(f"{file}: token {token!r} appears as id {ids[token]} and {i}")
    return Pieces(tokens, types, ids)


def read_list(metadata: Mapping[str, object], file: Path, name: str, kind: type) -> list[Any]:
    """tokenizer.ggml.`name`; raises ModelFileError unless it is a list of `kind`."""
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not set(map(type, value)) <= {kind}:
        raise ModelFileError(f"{file}: tokenizer.ggml.{name} is missing or not a list of {kind.__name__}")
    return value

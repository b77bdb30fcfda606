"""Canonical JSON and content digests: equal values have equal digests on every machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


def plain(value: Any) -> Any:
    """Dataclasses, tuples, sets and paths turned into what JSON has. Mutates nothing."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(v) for v in value)
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value


def canonical_json(value: Any) -> str:
    """Sorted keys, no spaces, no NaN (raises ValueError)."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(value: Any) -> str:
    """sha256 hex of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def file_digest(path: Path, tell: Callable[[int], None] | None = None) -> str:
    """sha256 hex of a file's bytes. `tell` gets how many of them were read, again and again."""
    digest, done = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num := file.readinto(buffer):
            digest.update(buffer[:num])
            done += num
            if tell is not None:
                tell(done)
    return digest.hexdigest()

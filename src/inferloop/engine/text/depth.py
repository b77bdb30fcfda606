"""How deep JSON may nest: far more than anybody means, far less than what runs out of stack."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""Levels of objects and lists, a value's own included."""


def is_too_deep(value: Any) -> bool:
    """Does not recurse itself."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
    return bool(level)

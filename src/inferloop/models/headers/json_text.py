"""JSON whose texts can be written again."""

from __future__ import annotations

import json
from collections.abc import Callable


def parse_json(text: str, pairs: Callable[[list[tuple[str, object]]], object] | None = None) -> object:
    """Raises ValueError or RecursionError, also for halves of a character (`\\ud800`), which nothing can encode and
    which would fail wherever they are first hashed or printed. `pairs` as json's object_pairs_hook."""
    value: object = json.loads(text, object_pairs_hook=pairs)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value

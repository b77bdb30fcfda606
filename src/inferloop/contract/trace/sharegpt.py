"""ShareGPT: a JSON list of {"id", "conversations": [{"from": "human" or "gpt", "value"}, ...]}.

Conversations without times. Texts are counted in tokens and forgotten: only lengths leave this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from inferloop.contract.trace.lines import json_array
from inferloop.contract.trace.record import CountTokens, Recorded
from inferloop.core.errors import TraceError

_ASKS = ("human", "user", "system")
_ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard")


def read(path: Path, count: CountTokens) -> Iterator[Recorded]:
    """One request per answer; its input is all that was said before. Raises TraceError."""
    for number, (line, entry) in enumerate(json_array(path)):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise TraceError("must be a list of turns", file=str(path), line=line, key="conversations")
        said, is_asked = 0, False
        for turn in turns:
            who, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
            if not isinstance(who, str) or not isinstance(text, str):
                raise TraceError("must have from and value", file=str(path), line=line, key="conversations")
            tokens = count(text)
            if who in _ANSWERS and is_asked:
                yield Recorded(None, said, tokens, session=str(number))
                is_asked = False
            elif who in _ASKS and tokens:
                is_asked = True
            said += tokens

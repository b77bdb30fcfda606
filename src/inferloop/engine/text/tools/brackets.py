"""Where a bracketed value ends, character by character."""

from __future__ import annotations

from typing import Literal

from inferloop.engine.text.depth import MAX_DEPTH

_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_BETWEEN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-.,:= \t\r\n")
"""What may stand outside strings, in JSON as in Python's literals."""

Verdict = Literal["open", "closed", "broken"]


class Brackets:
    """Follows one value from its first bracket (white space may stand before it) to the bracket that closes it. Not a
    parser: it only tells as early as it can that this cannot become a value any more."""

    def __init__(self, quotes: str) -> None:
        """`quotes`: what a string may begin with."""
        self._quotes = quotes
        self._expected: list[str] = []
        self._quote = ""
        self._escaped = False

    def step(self, char: str) -> Verdict:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
            return "open"
        if char in _CLOSERS:
            self._expected.append(_CLOSERS[char])
            return "open" if len(self._expected) <= MAX_DEPTH else "broken"
        if not self._expected:
            return "open" if char.isspace() else "broken"
        if char == self._expected[-1]:
            self._expected.pop()
            return "open" if self._expected else "closed"
        if char in self._quotes:
            self._quote = char
            return "open"
        return "open" if char in _BETWEEN else "broken"

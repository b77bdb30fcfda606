"""A text that opens something: it travels with the values that need it and stays out of everything that is written."""

from __future__ import annotations

from typing import NoReturn

_LEAST_PART = 4
"""Characters of a beginning that could tell something."""


class Secret:
    """Neither shown nor serialized: printing tells that there is one, and JSON refuses it, so a record that would hold
    it is never written. `reveal` is for the wire."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def redact(self, text: str) -> str:
        """The text without this in it, nor a part of it where the text was cut: what a server says may quote it."""
        if not self._text:
            return text
        whole = text.replace(self._text, str(self))
        for length in range(len(self._text) - 1, _LEAST_PART - 1, -1):
            if whole.endswith(self._text[:length]):
                return whole[:-length] + str(self)
        return whole

    def __repr__(self) -> str:
        return "[secret]"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")

"""Reads Python literals, and JSON's where they differ, without evaluating anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS: dict[str, Any] = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_STRING = re.compile(r"\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", "'": "'", '"': '"', "\n": ""}


class NotLiteralError(Exception):
    """The text is not what was expected here."""


class Reader:
    """Moves through `text`. The caller bounds how deep it nests. All methods raise NotLiteralError."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def match(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        found = pattern.match(self._text, self._at)
        if found is None:
            raise NotLiteralError
        self._at = found.end()
        return found[0]

    def expect(self, char: str) -> None:
        if not self._take(char):
            raise NotLiteralError

    def end(self) -> None:
        self._skip()
        if self._at != len(self._text):
            raise NotLiteralError

    def items(self, closer: str, item: Callable[[], T]) -> list[T]:
        """What stands between commas up to `closer`; one comma may stand before it."""
        found: list[T] = []
        while not self._take(closer):
            found.append(item())
            if not self._take(","):
                self.expect(closer)
                break
        return found

    def value(self) -> Any:
        self._skip()
        head = self._text[self._at : self._at + 1]
        if head in ("[", "("):
            self._at += 1
            return self.items("]" if head == "[" else ")", self.value)
        if head == "{":
            self._at += 1
            return dict(self.items("}", self._pair))
        if head in ('"', "'"):
            return self._string()
        if head.isalpha():
            word = self.match(_WORD)
            if word not in _WORDS:
                raise NotLiteralError
            return _WORDS[word]
        return self._number()

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        self.expect(":")
        return key, self.value()

    def _number(self) -> int | float:
        text = self.match(_NUMBER)
        try:
            return float(text) if any(c in text for c in ".eE") else int(text)
        except ValueError:  # more digits than Python converts
            raise NotLiteralError from None

    def _string(self) -> str:
        body = self.match(_STRING)[1:-1]
        text = _ESCAPE.sub(_unescape, body)
        # JSON writes characters beyond 16 bits as two halves; a half alone is no character
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _take(self, char: str) -> bool:
        self._skip()
        if not self._text.startswith(char, self._at):
            return False
        self._at += len(char)
        return True

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()


def _unescape(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code is None:
        return _SIMPLE.get(found[4], found[0])  # an unknown escape stands for itself, as in Python
    if int(code, 16) > 0x10FFFF:
        raise NotLiteralError
    return chr(int(code, 16))

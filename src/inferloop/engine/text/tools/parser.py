"""Calls found in an answer as it comes, however it is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from inferloop.engine.text.tools.brackets import Brackets
from inferloop.engine.text.tools.calls import ToolCall
from inferloop.engine.text.tools.dialect import Dialect

Event: TypeAlias = str | ToolCall
"""A piece of the answer's text, or a call."""


class ToolParser:
    """`push` pieces of one answer, then `finish`. Works character by character, so the events of all pieces joined do
    not depend on the cuts.

    A call is told when it is complete, so what is malformed, cut off, or names a function that was not offered stays
    text, to the letter. Separators (white space, mostly) between calls, before one and after the last are dropped.
    """

    def __init__(self, dialect: Dialect, names: Iterable[str], *, max_calls: int | None = None) -> None:
        """`names`: the functions offered. Calls beyond `max_calls` are dropped."""
        self._dialect, self._names = dialect, frozenset(names)
        self._openers = dialect.openers(self._names)
        self._heads = {mark[0] for mark in (*self._openers, dialect.closer) if mark}
        self._max_calls, self._num_calls = max_calls, 0
        self._events: list[Event] = []
        self._held = ""  # may become an opener or a closer
        self._gap: list[str] = []  # separators that are text only if text follows
        self._after_call = False  # nothing but separators since
        self._opener = ""
        self._body: list[str] = []
        self._brackets: Brackets | None = None  # of the call that is being read

    def push(self, text: str) -> list[Event]:
        for char in text:
            if self._brackets is None:
                self._outside(char)
            else:
                self._inside(char, self._brackets)
        return self._take()

    def finish(self) -> list[Event]:
        """What was held back. Call once, at the end of the answer."""
        if self._brackets is not None:
            self._drop_call()
        if not (self._after_call and self._dialect.closer.startswith(self._held)):  # cut inside the closing tag
            self._show(self._held)
        if not self._after_call:
            self._emit("".join(self._gap))
        self._held, self._gap = "", []
        return self._take()

    def _outside(self, char: str) -> None:
        if not self._held and char not in self._heads:
            self._show(char)
            return
        self._held += char
        while self._held:
            if self._held in self._openers:
                self._open()
                return
            if self._after_call and self._held == self._dialect.closer:
                self._held, self._gap = "", []
                return
            if self._may_open():
                return
            self._show(self._held[0])
            self._held = self._held[1:]

    def _may_open(self) -> bool:
        if self._after_call and self._dialect.closer.startswith(self._held):
            return True
        return self._held[0] in self._heads and any(opener.startswith(self._held) for opener in self._openers)

    def _open(self) -> None:
        self._opener, self._held = self._held, ""
        self._body, self._brackets = [], Brackets(self._dialect.quotes)
        if self._opener[0] in "{[":
            for char in self._opener:
                self._brackets.step(char)
            self._body.append(self._opener)
            self._opener = ""

    def _inside(self, char: str, brackets: Brackets) -> None:
        verdict = brackets.step(char)
        if verdict == "broken":
            self._drop_call()
            self._outside(char)
            return
        self._body.append(char)
        if verdict == "closed":
            calls = self._dialect.read("".join(self._body).strip())
            if not calls or any(call.name not in self._names for call in calls):
                self._drop_call()
                return
            self._brackets, self._gap, self._after_call = None, [], True
            for call in calls:
                self._num_calls += 1
                if self._max_calls is None or self._num_calls <= self._max_calls:
                    self._events.append(call)

    def _drop_call(self) -> None:
        """It was text after all."""
        self._brackets = None
        self._show(self._opener + "".join(self._body))

    def _show(self, text: str) -> None:
        shown = text.rstrip(self._dialect.separators)
        if shown:
            self._emit("".join(self._gap) + shown)
            self._gap, self._after_call = [], False
        self._gap.append(text[len(shown) :])

    def _emit(self, text: str) -> None:
        if text and self._events and isinstance(self._events[-1], str):
            self._events[-1] += text
        elif text:
            self._events.append(text)

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

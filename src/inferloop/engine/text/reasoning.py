"""What a model thinks before it answers: the text between `<think>` and `</think>`, told apart from the answer."""

from __future__ import annotations

from typing import Literal

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """`push` pieces of one answer, then `finish`; both give (reasoning, answer). Works character by character, so what
    comes out for all pieces joined does not depend on the cuts.

    Reasoning stands only at the beginning of an answer. White space around both tags is dropped. Without the closing
    tag, as when max_tokens cuts it, all is reasoning.
    """

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt ends inside the tag, as some templates have it; a model that repeats it is forgiven."""
        self._opened = opened
        self._state: Literal["start", "thinking", "gap", "answer"] = "start"
        self._held = ""  # may become a tag
        self._gap: list[str] = []  # white space that counts only if text follows
        self._reasoning: list[str] = []
        self._answer: list[str] = []
        self._has_thought = False

    @property
    def answering(self) -> bool:
        """Whether the answer has begun."""
        return self._state == "answer"

    def push(self, text: str) -> tuple[str, str]:
        if self._state == "answer":
            return "", text
        for char in text:
            self._step(char)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """What was held back. Call once, at the end of the answer."""
        if self._state == "start" and not self._opened:
            self._answer += [*self._gap, self._held]
        elif self._held:
            self._reason(self._held)
        return self._take()

    def _step(self, char: str) -> None:
        if self._state == "start":
            self._start(char)
        elif self._state == "thinking":
            self._think(char)
        elif self._state == "answer" or not char.isspace():
            self._state = "answer"
            self._answer.append(char)

    def _start(self, char: str) -> None:
        if not self._held and char.isspace():
            self._gap.append(char)
            return
        self._held += char
        if self._held == OPEN:
            self._state, self._held, self._gap = "thinking", "", []
        elif not OPEN.startswith(self._held):
            gap, held, self._gap, self._held = self._gap, self._held, [], ""
            if self._opened:
                self._state = "thinking"
                for one in held:
                    self._think(one)
            else:
                self._state = "answer"
                self._answer += [*gap, held]

    def _think(self, char: str) -> None:
        self._held += char
        while self._held and not CLOSE.startswith(self._held):
            first, self._held = self._held[0], self._held[1:]
            if first.isspace():
                self._gap.append(first)
            else:
                self._reason(first)
        if self._held == CLOSE:
            self._state, self._held, self._gap = "gap", "", []

    def _reason(self, text: str) -> None:
        self._reasoning += [*self._gap, text] if self._has_thought else [text]
        self._gap, self._has_thought = [], True

    def _take(self) -> tuple[str, str]:
        taken = "".join(self._reasoning), "".join(self._answer)
        self._reasoning, self._answer = [], []
        return taken

"""How many tokens of a choice were spent on thinking."""

from __future__ import annotations

from collections.abc import Iterable

from inferloop.engine.text.answer import AnswerParts


class ReasoningTokens:
    """Counts those that stand before the answer, tags included; none where nothing was thought."""

    def __init__(self) -> None:
        self._thought, self._num_before_answer = False, 0

    @property
    def num(self) -> int:
        return self._num_before_answer if self._thought else 0

    def add(self, found: Iterable[AnswerParts], num_tokens: int, *, answering: bool) -> None:
        """What `num_tokens` more brought; `answering` as the AnswerReader says after them."""
        thinking = any(parts.reasoning for parts in found)
        self._thought = self._thought or thinking
        if thinking or not answering:
            self._num_before_answer += num_tokens

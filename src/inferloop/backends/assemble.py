"""Tokens of one answer to the text a client may see, ended by the first complete stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from inferloop.core.request import Sampling
from inferloop.engine.schedule.step import TokenLogprob
from inferloop.engine.text.stop import StopMatcher


class IncrementalDecoder(Protocol):
    """What engine.text.detokenizer.Detokenizer does."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Piece(Struct, frozen=True, gc=False):
    """What became of some tokens: the text to show, how many of the tokens count, the stop that ended it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    stop: str | None = None


class Assembler:
    """State of one answer. Tokens after the one that completed a stop string are dropped, with their
    log-probabilities, so text, ids and usage agree however many tokens came at once."""

    def __init__(self, decoder: IncrementalDecoder, sampling: Sampling) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0

    def push(
        self, token_ids: Sequence[int], logprobs: tuple[TokenLogprob, ...] | None = None, *, hide_last: bool = False
    ) -> Piece:
        """`hide_last`: the last token is a stop token, which counts and has no text."""
        if not self._matcher.has_stops:
            text = self._decoder.push(token_ids[:-1] if hide_last else token_ids)
            return Piece(text, tuple(token_ids), logprobs)
        texts: list[str] = []
        for i, token_id in enumerate(token_ids):
            hidden = hide_last and i == len(token_ids) - 1
            text = "" if hidden else self._decoder.push((token_id,))
            self._num_tokens += 1
            shown, stop = self._match(text)
            texts.append(shown)
            if stop is not None:
                kept = tuple(token_ids[: i + 1])
                return Piece("".join(texts), kept, None if logprobs is None else logprobs[: i + 1], stop)
        return Piece("".join(texts), tuple(token_ids), logprobs)

    def flush(self) -> tuple[str, str | None]:
        """(rest of the text, stop that the rest completed). Call once, when no more tokens come."""
        shown, stop = self._match(self._decoder.flush())
        return (shown, stop) if stop is not None else (shown + self._matcher.flush(), None)

    def _match(self, text: str) -> tuple[str, str | None]:
        if self._num_tokens < self._min_tokens:  # a stop before min_tokens does not count
            return text, None
        return self._matcher.push(text)

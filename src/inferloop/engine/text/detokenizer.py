"""Ids to text while they arrive: no character early, none twice, none lost."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from inferloop.engine.text.tokenizer import Tokenizer


class Detokenizer:
    """State of one answer. The pieces of all pushes plus the flush equal `tokenizer.decode` of all ids, however the
    ids are split; what was returned is never taken back. Work per token does not grow with the answer.

    Bytes of an unfinished character are held until it is complete or until they cannot become one (then U+FFFD).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._vocabulary, self._skip_special = tokenizer.vocabulary, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.vocabulary.strips_leading_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with these ids; often empty."""
        return self._emit(self._decoder.decode(self._vocabulary.bytes_of(ids, skip_special=self._skip_special)))

    def flush(self) -> str:
        """What an unfinished character leaves at the end of the answer. Call once, after the last push."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

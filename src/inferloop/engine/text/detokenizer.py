"""Ids to text while they arrive: no character early, none twice, none lost."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from inferloop.engine.text.tokenizer import Tokenizer


class Detokenizer:
    """State of one answer, which comes `after` some ids. Their text and the pieces of all pushes and the flush join to
    `tokenizer.decode` of all ids (when `after` ends with a whole character), however the answer is split; what was
    returned is never taken back. Work per token does not grow with the answer.

    Bytes of an unfinished character are held until it is complete or until they cannot become one (then U+FFFD).
    """

    def __init__(self, tokenizer: Tokenizer, *, after: Sequence[int] = (), skip_special: bool = True) -> None:
        vocabulary = tokenizer.vocabulary
        self._vocabulary, self._skip_special = vocabulary, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_bytes = False
        """The decoder has the beginning of a character."""
        # the first space that a SentencePiece vocabulary writes begins the whole text, and so belongs to the prompt
        self._at_start = vocabulary.strips_leading_space and not vocabulary.bytes_of(after, skip_special=skip_special)

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids; often empty."""
        of = self._vocabulary
        if len(ids) == 1:
            data = of.bytes_of_one(ids[0], skip_special=self._skip_special)
        else:
            data = of.bytes_of(ids, skip_special=self._skip_special)
        if not self._holds_bytes and data.isascii():  # nearly always
            text = data.decode("ascii")
        else:
            text = self._decoder.decode(data)
            self._holds_bytes = bool(self._decoder.getstate()[0])
        return self._emit(text) if self._at_start else text

    def flush(self) -> str:
        """What an unfinished character leaves at the end of the answer. Call once, after the last push."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

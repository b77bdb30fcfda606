"""How few tokens a text can be, told without tokenizing it."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as Inner

from inferloop.engine.text.vocabulary import Vocabulary

_NFC_SHRINKS = 3
"""NFC makes a text at most this much shorter in UTF-8: three letters of Hangul, nine bytes, become one of three."""


class LengthBound:
    """A token stands for at most so many bytes, so a long text has at least so many tokens.

    Bytes that no token of their own stands for may vanish, so they do not count. Where a tokenizer may swallow text
    (added tokens that strip what is around them, steps that remove something) the bound is 0: nothing is known.
    """

    def __init__(self, inner: Inner, vocabulary: Vocabulary) -> None:
        alone = {token[0] for token in vocabulary.token_bytes if len(token) == 1}
        self._vanishing = bytes(b for b in range(256) if b not in alone)
        longest = max(map(len, vocabulary.token_bytes), default=0)
        self.bytes_per_token = longest * _shrinks(inner)
        """At most; 0 when a token may swallow any amount of text."""

    def least_tokens(self, text: str) -> int:
        """Lone surrogates, which are refused elsewhere, count as what they would take."""
        if not self.bytes_per_token:
            return 0
        text = text.replace("▁", " ")  # to a SentencePiece vocabulary that is a space, one byte instead of three
        kept = text.encode("utf-8", "surrogatepass").translate(None, self._vanishing)
        return -(-len(kept) // self.bytes_per_token)


def _shrinks(inner: Inner) -> int:
    """By which factor text may get shorter before it is cut into tokens; 0: any."""
    if any(token.lstrip or token.rstrip for token in inner.get_added_tokens_decoder().values()):
        return 0
    cutter = b"" if inner.pre_tokenizer is None else inner.pre_tokenizer.__getstate__()
    if b'"Removed"' in cutter or b"Whitespace" in cutter or b"Bert" in cutter:
        return 0
    factors = [_step_shrinks(step) for step in _steps(inner)]
    return 0 if 0 in factors else max(factors, default=1)


def _steps(inner: Inner) -> list[dict[str, Any]]:
    if inner.normalizer is None:
        return []
    state = json.loads(inner.normalizer.__getstate__())
    return list(state["normalizers"]) if state["type"] == "Sequence" else [state]


def _step_shrinks(step: dict[str, Any]) -> int:
    if step["type"] == "Prepend" or (step["type"] == "Replace" and step.get("content") == "▁"):
        return 1 if step.get("pattern", {"String": " "}) == {"String": " "} else 0
    return _NFC_SHRINKS if step["type"] == "NFC" else 0

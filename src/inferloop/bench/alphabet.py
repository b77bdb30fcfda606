"""Words that the target's tokenizer keeps apart, and the endless rows of them that prompts are made of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from inferloop.bench.words import WORDS
from inferloop.core.errors import UsageError

_MIN_WORDS = 64
_NUM_TRIED = 16
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MOST_KEPT_WORDS = 4_000_000


class TextCodec(Protocol):
    """The part of a tokenizer that is asked here."""

    def encode_text(self, text: str, /) -> tuple[int, ...]: ...


class Rows:
    """Each key stands for one endless row of words, the same on every machine: a shorter piece begins a longer one.

    The raw words of Philox-4x64 choose (Salmon et al. 2011), as in `contract.draws`. Texts made before are kept,
    the latest few million words of them, because turns of a conversation and shared prefixes ask for them again.
    """

    def __init__(self, words: Sequence[str], joiner: str) -> None:
        self._words, self._joiner = np.array(words, dtype=object), joiner
        self._texts: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._num_kept = 0

    @property
    def joiner(self) -> str:
        return self._joiner

    def text(self, key: int, count: int) -> str:
        """The first `count` words of the row of `key`."""
        if count <= 0:
            return ""
        text = self._texts.get((key, count))
        if text is None:
            drawn = np.random.Philox(key=key).random_raw(count)
            text = self._joiner.join(self._words[drawn % len(self._words)])
            self._keep(key, count, text)
        else:
            self._texts.move_to_end((key, count))
        return text

    def join(self, texts: Sequence[str]) -> str:
        """One text of several, as if their words stood in one row."""
        return self._joiner.join(text for text in texts if text)

    def _keep(self, key: int, count: int, text: str) -> None:
        self._texts[key, count] = text
        self._num_kept += count
        while self._num_kept > _MOST_KEPT_WORDS and len(self._texts) > 1:
            (_, dropped), _ = self._texts.popitem(last=False)
            self._num_kept -= dropped


def alphabet(codec: TextCodec) -> tuple[tuple[str, ...], str]:
    """(words, joiner): texts that are one token at the start and one more each behind another."""
    few = WORDS[:: len(WORDS) // _NUM_TRIED]
    counts = [len(codec.encode_text(word)) for word in few]
    fewest = min(counts)  # one token, and BOS where texts start with it
    if counts.count(fewest) > len(few) // 2:  # else no tokenizer of words: spare it the other questions
        after_line = len(codec.encode_text("the\nthe")) - fewest
        alone = _keep(
            WORDS, lambda some: len(codec.encode_text("\n".join(some))) == fewest + after_line * (len(some) - 1)
        )
        words = _keep(alone, lambda some: len(codec.encode_text(" ".join(["the", *some]))) == fewest + len(some))
        if len(words) >= _MIN_WORDS:
            return words, " "
    one, all_twice = len(codec.encode_text("a")), len(codec.encode_text(_LETTERS + _LETTERS[::-1]))
    if all_twice == one + 2 * len(_LETTERS) - 1:
        return tuple(_LETTERS), ""
    raise UsageError(
        "this tokenizer keeps neither words nor letters apart, so texts cannot be made exact; send token ids"
    )


def _keep(words: tuple[str, ...], holds: Callable[[tuple[str, ...]], bool]) -> tuple[str, ...]:
    """The words for which `holds`, asked of many at once because a tokenizer behind a URL is slow to ask."""
    if holds(words):
        return words
    if len(words) == 1:
        return ()
    middle = len(words) // 2
    return _keep(words[:middle], holds) + _keep(words[middle:], holds)

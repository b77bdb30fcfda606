"""Which bytes each token id stands for. Text is those bytes joined and decoded as UTF-8, nothing else.

That definition makes incremental decoding exact and constant-time per token, whatever the model's decoder is called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Inner

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_NO_TEXT = "\U0010ffff"
_SPM_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def byte_level_alphabet() -> dict[str, int]:
    """The printable character that GPT-2's byte-level vocabularies write for each byte (their `bytes_to_unicode`)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`token_bytes[i]` are the bytes of id i; `special` ids are control tokens, left out of answers."""

    token_bytes: tuple[bytes, ...]
    special: frozenset[int]
    strips_leading_space: bool
    """SentencePiece vocabularies write a space before the first word, which the text does not have."""

    def bytes_of(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        """Joined bytes. Ids outside the vocabulary (padding rows of an embedding) stand for nothing."""
        table, size, special = self.token_bytes, len(self.token_bytes), self.special if skip_special else ()
        return b"".join([table[i] for i in ids if 0 <= i < size and i not in special])

    def bytes_of_one(self, i: int, *, skip_special: bool = True) -> bytes:
        """As `bytes_of`."""
        return (
            self.token_bytes[i] if 0 <= i < len(self.token_bytes) and not (skip_special and i in self.special) else b""
        )


def read_vocabulary(inner: Inner, max_size: int) -> Vocabulary:
    """From a built tokenizer. Raises ValueError when its decoder is neither byte-level nor SentencePiece-like, or when
    an id reaches `max_size`, the rows that the model's embedding has."""
    # Its pickled state is its JSON; writing out the whole tokenizer for it would take longer than all the rest.
    steps = _steps(None if inner.decoder is None else json.loads(inner.decoder.__getstate__()))
    names = {step["type"] for step in steps}
    tokens = _tokens(inner, max_size)
    special = frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)
    if "ByteLevel" in names and names <= {"ByteLevel", "Fuse"}:
        return Vocabulary(_byte_level(tokens), special, False)
    marks_spaces = "Metaspace" in names or any(_replaces_underline(step) for step in steps)
    if names and names <= _SPM_STEPS and marks_spaces:
        fallback = "ByteFallback" in names
        return Vocabulary(tuple(_spm(t, fallback) for t in tokens), special, any(map(_strips, steps)))
    raise ValueError(f"a decoder of {sorted(names) or 'no kind'} is not supported (byte-level and SentencePiece are)")


def _tokens(inner: Inner, max_size: int) -> list[str]:
    """By id, empty where an id has none."""
    size = inner.get_vocab_size(with_added_tokens=True)
    if size <= max_size:
        found = [token for token in map(inner.id_to_token, range(size)) if token is not None]
        if len(found) == size:  # as nearly always, and in a third of the time that the dictionary takes
            return found
    ids = inner.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    if size > max_size:
        raise ValueError(f"the tokenizer has ids up to {size - 1}, the model only {max_size} rows")
    tokens = [""] * size
    for token, token_id in ids.items():
        tokens[token_id] = token
    return tokens


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _replaces_underline(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "Replace" and step["pattern"] == {"String": "▁"} and step["content"] == " ")


def _strips(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)


def _byte_level(tokens: list[str]) -> tuple[bytes, ...]:
    """Characters are turned into those of their bytes in Latin-1 for all tokens at once, a tenth of the work."""
    foreign = "\uffff"  # is in no byte's place, and Latin-1 cannot write it
    meant = dict.fromkeys(range(256), foreign) | {ord(c): chr(b) for c, b in byte_level_alphabet().items()}
    texts = _NO_TEXT.join(tokens).translate(meant).split(_NO_TEXT)
    if len(texts) != len(tokens):  # somebody did write it
        texts = [token.translate(meant) for token in tokens]
    out = []
    for token, text in zip(tokens, texts, strict=True):
        try:
            out.append(text.encode("latin-1"))
        except UnicodeEncodeError:  # an added token, written as it reads
            out.append(token.encode())
    return tuple(out)


def _spm(token: str, fallback: bool) -> bytes:
    found = _BYTE_TOKEN.match(token) if fallback else None
    return bytes([int(found[1], 16)]) if found else token.replace("▁", " ").encode()

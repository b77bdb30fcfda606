"""SentencePiece's BPE, rebuilt from the pieces and scores inside a GGUF file.

SentencePiece joins, of all neighbours whose joined text is a piece, those of the highest score, the leftmost of
several (Kudo and Richardson 2018, `bpe_model.cc`). Here the pairs are ranked once instead, so only what a ranking of
pairs can say is taken; the rest is refused. Control and user-defined tokens cut a text into parts, each of which gets
the space before its first word where the model wants one: what llama.cpp and the tokenizers that such models were
trained with do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers

from inferloop.core.errors import ModelFileError
from inferloop.engine.text.gguf_pieces import NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Pieces, read_list

_SPACE = "▁"
_MAX_CHARS = 1024
"""Of a piece; training makes none above 16, runs of spaces are longer. Work on one grows with the square."""


def sentence_piece(metadata: Mapping[str, object], file: Path, pieces: Pieces) -> Inner:
    """The tokenizer without its added tokens. Raises ModelFileError for what cannot be exact."""
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise ModelFileError(f"{file}: tokenizer.ggml.{key} is not supported for a vocabulary of kind llama")
    scores = read_list(metadata, file, "scores", float)
    if len(scores) != len(pieces.tokens):
        raise ModelFileError(f"{file}: tokenizer.ggml.scores has {len(scores)} entries for {len(pieces.tokens)} tokens")
    if any(f"<0x{b:02X}>" not in pieces.ids for b in range(256)):
        raise ModelFileError(f"{file}: the vocabulary has no byte tokens, so not every text could be written")
    prefix = has_space_prefix(metadata)
    if prefix and (spaced := next((t for t in pieces.of_type(USER_DEFINED) if {" ", _SPACE} & set(t)), None)):
        raise ModelFileError(
            f"{file}: a user-defined token with spaces, {spaced!r}, is not supported beside a space prefix"
        )
    unknown = next(iter(pieces.of_type(UNKNOWN)), None)
    merges = [(piece[:cut], piece[cut:]) for piece, cut in _merges(file, pieces, scores)]
    inner = Inner(models.BPE(vocab=pieces.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    before: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    after: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    inner.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    inner.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    return inner


def has_space_prefix(metadata: Mapping[str, object]) -> bool:
    """A text begins with a space of its own."""
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", True))


def _merges(file: Path, pieces: Pieces, scores: list[float]) -> list[tuple[str, int]]:
    """(piece, length of its left part) for every pair that can be joined, the first to be joined first."""
    ids, types = pieces.ids, pieces.types
    joined = {t: i for t, i in ids.items() if types[i] in (NORMAL, UNUSED)}
    frozen = set(pieces.of_type(USER_DEFINED))

    def may_be_part(text: str) -> bool:
        """A piece, or a character whether known or not; but what a user defined is never merged."""
        return text in joined or (len(text) == 1 and text not in frozen)

    found: list[tuple[float, str, int]] = []
    last_of: dict[float, str] = {}
    for piece, i in joined.items():
        if len(piece) > _MAX_CHARS:
            raise ModelFileError(f"{file}: piece {i} has {len(piece)} characters, {_MAX_CHARS} are supported")
        cuts = [c for c in range(1, len(piece)) if may_be_part(piece[:c]) and may_be_part(piece[c:])]
        if not cuts:
            continue
        if types[i] == UNUSED:
            raise ModelFileError(
                f"{file}: the piece {piece!r} is marked unused but can be merged, which is not supported"
            )
        if (other := last_of.setdefault(scores[i], piece)) != piece:
            raise ModelFileError(
                f"{file}: the pieces {other!r} and {piece!r} have the same score, which is not supported"
            )
        for cut in cuts:
            if (part := piece[:cut]) not in joined or (part := piece[cut:]) not in joined:
                raise ModelFileError(f"{file}: {part!r}, a part of the piece {piece!r}, is no piece itself")
            found.append((-scores[i], piece, cut))
    return [(piece, cut) for _, piece, cut in sorted(found)]

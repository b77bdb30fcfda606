"""A tokenizer from the vocabulary inside a GGUF file. What cannot be rebuilt exactly is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from inferloop.core.errors import ModelFileError
from inferloop.engine.text.gguf_pieces import CONTROL, UNKNOWN, USER_DEFINED, read_list, read_pieces
from inferloop.engine.text.gguf_spm import has_space_prefix, sentence_piece

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""A word also ends where lower case is followed by upper case."""


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(pattern: str) -> Callable[[], Any]:
    def build() -> Any:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "default": _gpt2,
    "llama-bpe": _words(_LLAMA3_WORDS),
    "llama3": _words(_LLAMA3_WORDS),
    "llama-v3": _words(_LLAMA3_WORDS),
    "qwen2": _words(_QWEN2_WORDS),
    "tekken": _words(_TEKKEN_WORDS),
}
"""tokenizer.ggml.pre -> how text is cut into words before merging."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Those that take a word that is a token without merging, and begin texts with BOS where a file does not say."""


def build_from_gguf(metadata: Mapping[str, object], file: Path) -> tuple[Inner, bool]:
    """The tokenizer and whether it puts BOS before a text.

    Raises ModelFileError for a vocabulary that is damaged or of a kind that is not known exactly.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        what = "'t5' (Unigram)" if kind == "t5" else repr(kind)
        raise ModelFileError(
            f"{file}: vocabulary kind {what} is not supported (gpt2, byte-level BPE, and llama, SentencePiece BPE, are)"
        )
    pieces = read_pieces(metadata, file)
    if kind == "gpt2":
        inner, default_bos = _byte_level(metadata, file, pieces.ids)
        matches_normalized = False
    else:
        inner, default_bos = sentence_piece(metadata, file, pieces), True
        matches_normalized = not has_space_prefix(metadata)  # a prefix would become part of what is looked for
    for token_type in (CONTROL, UNKNOWN):
        inner.add_special_tokens([AddedToken(t, normalized=False) for t in pieces.of_type(token_type)])
    inner.add_tokens([AddedToken(t, normalized=matches_normalized) for t in pieces.of_type(USER_DEFINED)])
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", default_bos)
    return inner, bool(add_bos)


def _byte_level(metadata: Mapping[str, object], file: Path, ids: dict[str, int]) -> tuple[Inner, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelFileError(f"{file}: tokenizer.ggml.pre {pre!r} is not supported (supported: {known})")
    written = read_list(metadata, file, "merges", str)
    takes_words = pre in _WHOLE_WORDS
    try:
        merges = [tuple(merge.split(" ", 1)) for merge in written]
        inner = Inner(models.BPE(vocab=ids, merges=merges, ignore_merges=takes_words))
    except Exception as problem:  # the library raises bare Exception, and does not say which merge it is
        wrong = next((f"merge {merge!r} does" for merge in written if not _fits(merge, ids)), "merges do")
        raise ModelFileError(f"{file}: {wrong} not fit the vocabulary") from problem
    inner.pre_tokenizer = _PRE_TOKENIZERS[str(pre)]()
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    return inner, takes_words


def _fits(merge: str, ids: dict[str, int]) -> bool:
    left, space, right = merge.partition(" ")
    return bool(space) and {left, right, left + right} <= ids.keys()

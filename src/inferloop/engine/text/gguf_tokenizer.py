"""A tokenizer from the vocabulary inside a GGUF file. What cannot be rebuilt exactly is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from inferloop.core.errors import ModelFileError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


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
    "qwen2": _words(_QWEN2_WORDS),
}
"""tokenizer.ggml.pre -> how text is cut into words before merging."""


def build_from_gguf(metadata: Mapping[str, object], file: Path) -> tuple[Inner, bool]:
    """The tokenizer and whether it puts BOS before a text.

    Raises ModelFileError for a vocabulary that is damaged or of a kind that is not known exactly.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens, types = _list(metadata, file, "tokens", str), _list(metadata, file, "token_type", int)
    if len(tokens) != len(types):
        raise ModelFileError(f"{file}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if ids.setdefault(token, i) != i and types[i] != _UNUSED:
            raise ModelFileError(f"{file}: token {token!r} appears as id {ids[token]} and {i}")
    if kind == "gpt2":
        inner, default_bos = _byte_level(metadata, file, ids)
    elif kind == "llama":
        inner, default_bos = _sentence_piece(metadata, file, ids, tokens, types), True
    else:
        raise ModelFileError(f"{file}: vocabulary kind {kind!r} is not supported (gpt2 and llama are)")
    for kind_id in (_CONTROL, _UNKNOWN, _USER_DEFINED):
        marked = [t for t, k in zip(tokens, types, strict=True) if k == kind_id and t]
        special = kind_id != _USER_DEFINED
        added = [AddedToken(t, special=special, normalized=False) for t in marked]
        (inner.add_special_tokens if special else inner.add_tokens)(added)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", default_bos)
    return inner, bool(add_bos)


def _byte_level(metadata: Mapping[str, object], file: Path, ids: dict[str, int]) -> tuple[Inner, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelFileError(f"{file}: tokenizer.ggml.pre {pre!r} is not supported (supported: {known})")
    merges = []
    for merge in _list(metadata, file, "merges", str):
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= ids.keys():
            raise ModelFileError(f"{file}: merge {merge!r} does not fit the vocabulary")
        merges.append((left, right))
    is_llama3 = pre == "llama-bpe"
    inner = Inner(models.BPE(vocab=ids, merges=merges, ignore_merges=is_llama3))
    inner.pre_tokenizer = _PRE_TOKENIZERS[str(pre)]()
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    return inner, is_llama3


def _sentence_piece(
    metadata: Mapping[str, object], file: Path, ids: dict[str, int], tokens: list[Any], types: list[Any]
) -> Inner:
    """SentencePiece BPE: the pair whose joined piece scores highest is merged first, so scores give the merges."""
    scores = _list(metadata, file, "scores", float)
    if len(scores) != len(tokens):
        raise ModelFileError(f"{file}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    if any(f"<0x{b:02X}>" not in ids for b in range(256)):
        raise ModelFileError(f"{file}: the vocabulary has no byte tokens, so not every text could be written")
    normal = {t: i for t, i in ids.items() if types[i] == 1}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, i in normal.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                ranked.append((-scores[i], normal[left], normal[right], left, right))
    ranked.sort()
    unknown = next((t for t, k in zip(tokens, types, strict=True) if k == _UNKNOWN), None)
    inner = Inner(
        models.BPE(
            vocab=ids,
            merges=[(left, right) for *_, left, right in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    inner.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return inner


def _list(metadata: Mapping[str, object], file: Path, name: str, kind: type) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(type(v) is kind for v in value):
        raise ModelFileError(f"{file}: tokenizer.ggml.{name} is missing or not a list of {kind.__name__}")
    return value

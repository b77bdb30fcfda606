"""Text to ids and back, from whatever the model ships: tokenizer.json or the vocabulary inside a GGUF file."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer as Inner

from inferloop.core.errors import ModelFileError, RequestError
from inferloop.engine.text.gguf_tokenizer import build_from_gguf
from inferloop.engine.text.length import LengthBound
from inferloop.engine.text.vocabulary import Vocabulary, read_vocabulary
from inferloop.models.headers.config_json import read_json_object
from inferloop.models.resolve import ModelFiles


class Tokenizer:
    """Immutable and safe to share between threads; encoding runs outside the interpreter lock."""

    def __init__(
        self,
        inner: Inner,
        vocabulary: Vocabulary,
        *,
        digest: str,
        adds_bos: bool,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        special_texts: Mapping[str, str],
    ) -> None:
        self._inner, self.vocabulary = inner, vocabulary
        self._length = LengthBound(inner, vocabulary)
        self._plain: Inner | None = None
        self._plain_lock = threading.Lock()
        self.digest = digest
        """sha256 hex of the vocabulary, merges, settings and names of special tokens that the model's files hold."""
        self.adds_bos = adds_bos
        """A text of this model starts with BOS."""
        self.bos_token_id, self.eos_token_ids = bos_token_id, eos_token_ids
        self.special_texts = dict(special_texts)
        """`bos_token`, `eos_token`, ... as chat templates name them."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to one less."""
        return len(self.vocabulary.token_bytes)

    @property
    def eos_token_id(self) -> int | None:
        """The first end token, for who wants just one."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Ids without BOS. With `allow_special` the text of a control token becomes that token, as chat templates
        need; without it such text is spelled out like any other. Raises RequestError for lone surrogates."""
        inner = self._inner if allow_special else self._without_special()
        try:
            # the library's plain `encode` keeps the interpreter lock: one long prompt would stop the step loop
            ids: list[int] = inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError):  # the library reports a string it cannot hold as UTF-8 either way
            raise RequestError("the text holds a lone surrogate, which is not valid Unicode") from None
        return ids

    def to_json(self) -> str:
        """What a tokenizer.json holds."""
        return str(self._inner.to_str())

    def least_tokens(self, text: str) -> int:
        """`encode` makes no fewer of this text; 0 when nothing can be said without trying."""
        return self._length.least_tokens(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of all ids at once; bytes that are not valid UTF-8 become U+FFFD."""
        text = self.vocabulary.bytes_of(ids, skip_special=skip_special).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.vocabulary.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, control tokens included; often a part of a character only."""
        return self.vocabulary.bytes_of_one(token_id, skip_special=False)

    def _without_special(self) -> Inner:
        with self._plain_lock:
            if self._plain is None:
                self._plain = Inner.from_str(self._inner.to_str())
                self._plain.encode_special_tokens = True
            return self._plain


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Raises ModelFileError when the tokenizer is absent, damaged or cannot be rebuilt exactly."""
    return _from_gguf(files) if files.kind == "gguf" else _from_directory(files)


def _from_gguf(files: ModelFiles) -> Tokenizer:
    metadata = files.header.metadata
    inner, adds_bos = build_from_gguf(metadata, files.path)
    digest = hashlib.sha256()
    for key in sorted(k for k in metadata if k.startswith("tokenizer.ggml.")):
        digest.update(json.dumps([key, metadata[key]]).encode())
    texts = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < inner.get_vocab_size(with_added_tokens=True):
            text = inner.id_to_token(token_id)
            if text is not None:
                texts[f"{name}_token"] = text
    return _build(files, inner, digest.hexdigest(), adds_bos, files.header.bos_token_id, texts)


def _from_directory(files: ModelFiles) -> Tokenizer:
    file = files.path / "tokenizer.json"
    if not file.is_file():
        raise ModelFileError(f"{file}: missing; a directory needs the fast tokenizer that this file holds")
    try:
        raw = file.read_bytes()
        inner = Inner.from_buffer(raw)
    except Exception as problem:  # the library raises bare Exception
        raise ModelFileError(f"{file}: cannot be read as a tokenizer: {problem}") from problem
    texts = _special_texts(files.path / "tokenizer_config.json")
    inner = _without_rowless(inner, raw, files, texts)
    inner.no_truncation()
    inner.no_padding()
    begun = inner.encode("a", add_special_tokens=True)
    first = begun.ids[0] if begun.special_tokens_mask[:1] == [1] else None  # "a" is none, an end token comes behind it
    bos = files.header.bos_token_id if first is None else first
    digest = hashlib.sha256(raw + json.dumps(sorted(texts.items())).encode())
    eos = inner.token_to_id(texts["eos_token"]) if "eos_token" in texts else None
    return _build(files, inner, digest.hexdigest(), first is not None, bos, texts, eos)


def _without_rowless(inner: Inner, raw: bytes, files: ModelFiles, texts: Mapping[str, str]) -> Inner:
    """Without tokens that were added beyond the rows of the embedding, such as that for images beside text models of
    Gemma 3: their text is spelled out like any other. Raises ModelFileError for one that prompts or answers need, which
    are then of another model."""
    rows, header = files.header.shape.vocab_size, files.header
    rowless = {i: t.content for i, t in inner.get_added_tokens_decoder().items() if i >= rows}
    if not rowless:
        return inner
    written = f"{header.chat_template or ''}{header.tool_chat_template or ''}"
    ends = {texts.get("bos_token"), texts.get("eos_token")}
    if needed := next((t for t in rowless.values() if t in ends or t in written), None):
        raise ModelFileError(f"{files.path}: the token {needed!r} lies outside the {rows} rows of the model")
    told = json.loads(raw)
    told["added_tokens"] = [token for token in told["added_tokens"] if token["id"] not in rowless]
    return Inner.from_str(json.dumps(told))


def _special_texts(config: Path) -> dict[str, str]:
    if not config.is_file():
        return {}
    texts = {}
    for name, value in read_json_object(config).items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _build(
    files: ModelFiles,
    inner: Inner,
    digest: str,
    adds_bos: bool,
    bos: int | None,
    texts: Mapping[str, str],
    eos_of_tokenizer: int | None = None,
) -> Tokenizer:
    rows = files.header.shape.vocab_size
    try:
        vocabulary = read_vocabulary(inner, rows)
    except ValueError as problem:
        raise ModelFileError(f"{files.path}: {problem}") from problem
    eos = files.header.eos_token_ids
    if eos_of_tokenizer is not None and eos_of_tokenizer not in eos:  # all that some chat models change of their base
        eos = (*eos, eos_of_tokenizer)
    wrong = [i for i in (*eos, *([] if bos is None else [bos])) if i >= rows]
    if wrong:
        raise ModelFileError(f"{files.path}: special token id {wrong[0]} lies outside the vocabulary of {rows}")
    if adds_bos and bos is None:
        raise ModelFileError(f"{files.path}: texts should start with BOS, but no BOS token is named")
    return Tokenizer(
        inner, vocabulary, digest=digest, adds_bos=adds_bos, bos_token_id=bos, eos_token_ids=eos, special_texts=texts
    )

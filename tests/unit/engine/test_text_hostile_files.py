"""Model files with damaged vocabularies: a typed error or a working codec, never anything else."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferloop.core.errors import InferloopError, ModelFileError
from inferloop.engine.text.codec import Codec
from inferloop.engine.text.gguf_tokenizer import build_from_gguf
from inferloop.engine.text.vocabulary import read_vocabulary
from inferloop.models.headers.gguf import read_gguf_file
from inferloop.models.resolve import resolve

RELAXED = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


def use(path: Path) -> None:
    codec = Codec(resolve(str(path)))
    ids = codec.encode_text("ab 12 <end> 世")
    codec.decode(ids, skip_special=False)


@given(data=st.data())
@RELAXED
def test_flipped_bytes_of_a_gguf_file(tiny_gguf: Callable[..., Path], tmp_path: Path, data: st.DataObject) -> None:
    path = tiny_gguf()
    damaged = bytearray(path.read_bytes())
    first = min(t.offset for t in read_gguf_file(path).tensors.values())
    for at in data.draw(st.lists(st.integers(0, first - 1), min_size=1, max_size=4)):
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    with contextlib.suppress(InferloopError):
        use(path)


def tokenizer_json(folder: Path, change: Callable[[Any], None]) -> None:
    file = folder / "tokenizer.json"
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.pop("model"),
        lambda v: v.update(model={"type": "WordPiece"}),
        lambda v: v.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
        lambda v: v.update(decoder=None),
        lambda v: v["model"].update(vocab=[]),
        lambda v: v["model"].update(merges=[["a", "zz"]]),
        lambda v: v["added_tokens"].append({"id": -1}),
        lambda v: v["model"]["vocab"].update(x=4_000_000_000),
    ],
)
def test_a_tokenizer_json_that_cannot_be_used_is_named(
    tiny_directory: Callable[..., Path], change: Callable[[Any], None]
) -> None:
    folder = tiny_directory()
    tokenizer_json(folder, change)
    with pytest.raises(ModelFileError, match="tiny"):
        Codec(resolve(str(folder)))


@given(data=st.data())
@RELAXED
def test_damaged_sentence_pieces(data: st.DataObject) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += ["ab", "▁ab", "abab", "▁", "a", "b", "<x>", ""]
    types: list[Any] = [2, 3, 3] + [6] * 256 + [1] * 6 + [4, 1]
    scores: list[Any] = [-float(i) for i in range(len(tokens))]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(259, len(tokens) - 1), st.integers(0, 258)))
        tokens[at] = data.draw(
            st.sampled_from([tokens[at], "", "a", "▁▁", " ", "<s>", "\0", "b" * 2000, "<0x41>", "é"])
        )
        types[at] = data.draw(st.sampled_from([types[at], 0, 1, 2, 3, 4, 5, 6, -1, 10**9, 1.0]))
        scores[at] = data.draw(st.sampled_from([scores[at], 0.0, math.nan, math.inf, -math.inf, 1e308, 3]))
    prefix = data.draw(st.booleans())
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "add_space_prefix": prefix}
    with contextlib.suppress(ModelFileError):
        inner, _ = build_from_gguf({f"tokenizer.ggml.{k}": v for k, v in keys.items()}, Path("damaged.gguf"))
        ids = inner.encode("ab <x> abab 世", add_special_tokens=False).ids
        vocabulary = read_vocabulary(inner, 10_000)
        vocabulary.bytes_of(ids).decode("utf-8", "replace")

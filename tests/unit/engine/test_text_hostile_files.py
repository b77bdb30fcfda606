"""Model files with damaged vocabularies: a typed error or a working codec, never anything else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferloop.core.errors import InferloopError, ModelFileError
from inferloop.engine.text.codec import Codec
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

"""A GGUF file as a directory: the same model, in bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from inferloop.backends.as_directory import as_directory, to_bf16
from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.stored import half_split, read_tensor
from inferloop.engine.text.codec import Codec
from inferloop.models.resolve import open_files


def test_weights_tokenizer_and_template_are_the_same(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source = open_files("tiny", tiny_gguf())
    made = as_directory(source, cache_dir=tmp_path / "cache")
    assert (made.kind, made.model_id) == ("hf", "tiny")
    assert made.header.shape == source.header.shape
    assert made.header.rope.theta == source.header.rope.theta and made.header.norm_eps == source.header.norm_eps
    assert made.header.eos_token_ids == source.header.eos_token_ids
    for name, info in source.header.tensors.items():
        before = half_split(read_tensor(info), info, source.header.shape.head_dim)
        after = half_split(read_tensor(made.header.tensors[name]), made.header.tensors[name], 4)
        np.testing.assert_allclose(after, before, rtol=2**-8, atol=0, err_msg=name)
    ours, theirs = Codec(source), Codec(made)
    chat = [{"role": "user", "content": "ab é 世界 <end>"}]
    assert ours.encode_chat(chat) == theirs.encode_chat(chat)
    assert ours.encode_text("ab ab") == theirs.encode_text("ab ab")
    assert ours.template_digest == theirs.template_digest


def test_it_is_made_once(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source = open_files("tiny", tiny_gguf())
    made = as_directory(source, cache_dir=tmp_path / "cache")
    stamp = (made.path / "model.safetensors").stat()
    again = as_directory(source, cache_dir=tmp_path / "cache")
    assert again.path == made.path and (again.path / "model.safetensors").stat().st_ino == stamp.st_ino
    assert as_directory(made, cache_dir=tmp_path / "cache") is made
    assert not list((tmp_path / "cache" / "directories").glob("*.part"))


def test_what_cannot_be_written_so_is_refused(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:

    def edit(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    with pytest.raises(ModelFileError, match="plain models of the llama family"):
        as_directory(open_files("tiny", tiny_gguf(edit=edit)), cache_dir=tmp_path)


def test_rounding_is_to_nearest_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 0.0, 3.3e38], np.float32)
    expected = np.array([1.0, 1.0, 1 + 2**-6, -1 - 2**-7, 0.0, 3.3e38], np.float32)
    rounded = (to_bf16(values).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(rounded, expected, rtol=2**-9)
    assert rounded[:5].tolist() == expected[:5].tolist()

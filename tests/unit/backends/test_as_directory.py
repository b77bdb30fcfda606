"""A GGUF file as a directory: the same model, in bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from inferloop.backends.as_directory import as_directory, to_bf16
from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.rope import inverse_frequencies
from inferloop.engine.compute.stored import half_split, read_tensor
from inferloop.engine.text.codec import Codec
from inferloop.models.headers import RopeSpec
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


LLAMA3 = RopeSpec(5e5, 64, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def with_divisors(stretch: float = 1.0) -> Callable[[Any], None]:
    """As converters write Llama 3.2; `stretch`: as nobody does."""
    plain = inverse_frequencies(RopeSpec(5e5, 64), 131_072)
    divisors = plain / inverse_frequencies(LLAMA3, 131_072)
    divisors[20] *= stretch

    def edit(writer: Any) -> None:
        writer.add_rope_freq_base(5e5)
        writer.add_tensor("rope_freqs.weight", divisors)

    return edit


def test_positions_are_scaled_as_in_the_file(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    """Llama 3.1 and later, whose files hold divisors instead of the words for them."""
    source = open_files("tiny", tiny_gguf(head_dim=64, edit=with_divisors()))
    made = as_directory(source, cache_dir=tmp_path / "cache").header
    factors = read_tensor(source.header.tensors["rope_freqs.weight"])
    before = inverse_frequencies(source.header.rope, 64) / factors
    np.testing.assert_allclose(inverse_frequencies(made.rope, 64), before, rtol=1e-5)
    assert made.rope.kind == "llama3" and "rope_freqs.weight" not in made.tensors
    other = open_files("tiny", tiny_gguf("other.gguf", head_dim=64, edit=with_divisors(1.5)))
    with pytest.raises(ModelFileError, match="not how Llama 3 scales positions"):
        as_directory(other, cache_dir=tmp_path / "cache")


def test_texts_begin_as_in_the_file(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    def edit(writer: Any) -> None:
        writer.add_bos_token_id(257)
        writer.add_add_bos_token(True)

    source = open_files("tiny", tiny_gguf(edit=edit))
    made = as_directory(source, cache_dir=tmp_path / "cache")
    assert Codec(made).encode_text("ab") == Codec(source).encode_text("ab") == (257, 256)
    assert PreTrainedTokenizerFast.from_pretrained(made.path)("ab").input_ids == [257, 256]


def test_a_bias_is_not_left_behind(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source = open_files("tiny", tiny_gguf(edit=lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(8, np.float32))))
    with pytest.raises(ModelFileError, match="plain models of the llama family"):
        as_directory(source, cache_dir=tmp_path)


def test_rounding_is_to_nearest_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 0.0, 3.3e38], np.float32)
    expected = np.array([1.0, 1.0, 1 + 2**-6, -1 - 2**-7, 0.0, 3.3e38], np.float32)
    rounded = (to_bf16(values).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(rounded, expected, rtol=2**-9)
    assert rounded[:5].tolist() == expected[:5].tolist()

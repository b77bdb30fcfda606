"""Whose share is what, and that the shares of a file are the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.core.errors import ModelFileError, UsageError
from inferloop.core.shape import Experts
from inferloop.engine.compute.stored import half_split, read_tensor
from inferloop.engine.compute.torch.parallel.split import Share, even, header_of_share, share_of
from inferloop.models.headers import ModelHeader, read_header
from inferloop.models.resolve import ModelFiles


@given(num=st.integers(0, 500), num_parts=st.integers(1, 9), unit=st.sampled_from([1, 32, 256]))
def test_parts_are_all_there_in_turn_and_differ_by_one_unit(num: int, num_parts: int, unit: int) -> None:
    num *= unit
    parts = [even(num, i, num_parts, unit) for i in range(num_parts)]
    assert [n for part in parts for n in part] == list(range(num))
    assert all(len(part) % unit == 0 for part in parts)
    sizes = [len(part) for part in parts]
    assert sizes[0] == min(sizes) and max(sizes) - min(sizes) <= unit


@given(num_kv=st.integers(1, 12), each=st.integers(1, 8), data=st.data())
def test_every_head_finds_its_keys_where_it_looks(
    embedded_model: ModelFiles, num_kv: int, each: int, data: st.DataObject
) -> None:
    """A rank takes its heads to be grouped evenly over the KV heads that it keeps."""
    size = data.draw(st.integers(1, num_kv * each))
    shape = replace(embedded_model.header.shape, num_heads=num_kv * each, num_kv_heads=num_kv, ffn_size=10_000 * 32)
    shares = [share_of(replace(embedded_model.header, shape=shape), rank, size) for rank in range(size)]
    assert [head for share in shares for head in share.heads] == list(range(num_kv * each))
    for share in shares:
        assert len(share.heads) % len(share.kv_heads) == 0
        local_each = len(share.heads) // len(share.kv_heads)
        for place, head in enumerate(share.heads):
            assert share.kv_heads[place // local_each] == head // each
    if size <= num_kv:  # nothing is kept twice
        assert [kv for share in shares for kv in share.kv_heads] == list(range(num_kv))


def test_nine_heads_over_two(embedded_model: ModelFiles) -> None:
    """Three KV heads: one and two, and the heads that go with them. The feed-forward is cut between blocks of 32."""
    first, second = (share_of(embedded_model.header, rank, 2) for rank in range(2))
    assert (first.heads, first.kv_heads, first.ffn, first.vocab) == (range(3), range(1), range(768), range(24576))
    assert (second.heads, second.kv_heads, second.ffn) == (range(3, 9), range(1, 3), range(768, 1536))


def whole(headers: list[ModelHeader], name: str) -> Any:
    """A tensor put together from the parts that the ranks read."""
    parts = [
        half_split(read_tensor(header.tensors[name]), header.tensors[name], header.shape.head_dim)
        for header in headers
        if name in header.tensors
    ]
    if "norm" in name:
        assert all(np.array_equal(part, parts[0]) for part in parts)
        return parts[0]
    if name.endswith(("o_proj.bias", "down_proj.bias")):
        [part] = parts
        return part
    return np.concatenate(parts, 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)


def assert_all_there(header: ModelHeader, size: int) -> None:
    headers = [header_of_share(header, share_of(header, rank, size)) for rank in range(size)]
    for name, info in header.tensors.items():
        expected = half_split(read_tensor(info), info, header.shape.head_dim)
        np.testing.assert_array_equal(whole(headers, name), expected, err_msg=name)


@pytest.mark.parametrize("size", [2, 3])
def test_the_real_models_shares_are_the_model(embedded_model: ModelFiles, size: int) -> None:
    """Quantized blocks and interleaved rotary pairs, as they lie in the file; no rank has much more than its part."""
    header = embedded_model.header
    names = [n for n in header.tensors if ".layers." not in n or ".layers.7." in n]
    assert_all_there(replace(header, tensors={n: header.tensors[n] for n in names}), size)
    num_bytes = sum(info.num_bytes for info in header.tensors.values())
    for rank in range(size):
        share = header_of_share(header, share_of(header, rank, size))
        assert sum(info.num_bytes for info in share.tensors.values()) < 1.1 * num_bytes / size


def test_biases_are_split_or_counted_once(random_model: Callable[..., Any], tmp_path: Path) -> None:
    random_model(tmp_path, "llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    assert_all_there(read_header(tmp_path), 2)


@pytest.mark.parametrize("size", [10, 64])
def test_more_ranks_than_heads_are_refused(embedded_model: ModelFiles, size: int) -> None:
    with pytest.raises(UsageError, match=rf"--tensor-parallel-size {size}: .*9 heads .* 1 to 9 ranks"):
        share_of(embedded_model.header, 0, size)


def test_experts_are_refused(embedded_model: ModelFiles) -> None:
    shape = replace(embedded_model.header.shape, experts=Experts(4, 2, 64, (0,)))
    with pytest.raises(UsageError, match="has experts"):
        share_of(replace(embedded_model.header, shape=shape), 0, 2)


def test_blocks_that_two_ranks_would_have_to_share_are_refused_by_name(embedded_model: ModelFiles) -> None:
    """Three heads of 64 are no whole number of a K-quant's 256."""
    name = "model.layers.0.self_attn.o_proj.weight"
    info = replace(embedded_model.header.tensors[name], dtype="q4_k", shape=(576, 768), num_bytes=576 * 3 * 144)
    header = replace(embedded_model.header, tensors={name: info})
    share = Share(0, 2, range(3), range(1), range(768), range(24576))
    with pytest.raises(ModelFileError, match="q4_k"):
        header_of_share(header, share)

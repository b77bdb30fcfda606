"""Codes and scales of GGUF's blocks against gguf's own numbers, and the tiles they go into against what is written."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferloop.engine.compute.groups import GROUP_TYPES, GroupCodes, GroupForm, common_form, promote, read_groups
from inferloop.engine.compute.native.int8 import quantize, to_int8
from inferloop.engine.compute.native.tiles import (
    bf16_bits,
    group_form,
    group_matrix,
    plain_matrix,
    read_group_tiles,
    read_plain_tiles,
    write_groups,
    write_plain,
)

SEEDS = st.integers(0, 2**32 - 1)


def random_blocks(dtype: str, rows: int, blocks: int, seed: int) -> NDArray[np.uint8]:
    """Any bytes, but for scales, which are finite numbers of every size fp16 has."""
    rng = np.random.default_rng(seed)
    layout = GROUP_TYPES[dtype].block
    stored = rng.integers(0, 256, (rows, blocks * layout.itemsize), dtype=np.uint8)
    fields = stored.view(layout)
    for name in set(layout.names or ()) & {"d", "m", "dmin"}:
        fields[name] = rng.standard_normal(fields.shape) * 2.0 ** rng.integers(-24, 12, fields.shape)
    return stored


def theirs(dtype: str, stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = dequantize(stored, gguf.GGMLQuantizationType[dtype.upper()])
    return values


@pytest.mark.parametrize("dtype", GROUP_TYPES)
@given(seed=SEEDS, rows=st.integers(1, 3), blocks=st.integers(1, 3))
def test_values_are_those_of_gguf_to_the_last_bit(dtype: str, seed: int, rows: int, blocks: int) -> None:
    stored = random_blocks(dtype, rows, blocks, seed)
    groups = read_groups(dtype, stored)
    np.testing.assert_array_equal(groups.values(), theirs(dtype, stored), strict=True)
    assert groups.codes.max() < 1 << groups.form.bits


@pytest.mark.parametrize("dtype", GROUP_TYPES)
def test_narrow_forms_have_scales_that_fp16_holds(dtype: str) -> None:
    groups = read_groups(dtype, random_blocks(dtype, 8, 4, seed=1))
    for numbers in (groups.scales, groups.mins):
        if numbers is not None:
            with np.errstate(over="ignore"):
                held = bool((numbers.astype(np.float16) == numbers).all())
            assert held != groups.form.wide


@pytest.mark.parametrize("dtype", GROUP_TYPES)
@pytest.mark.parametrize("other", GROUP_TYPES)
def test_a_common_form_changes_no_value(dtype: str, other: str) -> None:
    groups = read_groups(dtype, random_blocks(dtype, 2, 2, seed=2))
    form = common_form([groups.form, GROUP_TYPES[other].form])
    promoted = promote(groups, form)
    assert promoted.form == form
    np.testing.assert_array_equal(promoted.values(), groups.values(), strict=True)


def test_equal_forms_stay_as_small_as_they_are() -> None:
    for kind in GROUP_TYPES.values():
        assert common_form([kind.form, kind.form]) == kind.form


FORMS = st.builds(
    GroupForm,
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([16, 32]),
    offset=st.sampled_from([0, 8]),
    wide=st.booleans(),
    has_min=st.booleans(),
)


@given(form=FORMS, num_tiles=st.integers(1, 3), records=st.integers(1, 3), seed=SEEDS)
def test_group_tiles_are_laid_out_as_written(form: GroupForm, num_tiles: int, records: int, seed: int) -> None:
    """Every code, scale and min is looked up where cpp/types.h says, one by one."""
    rng = np.random.default_rng(seed)
    n, k = 16 * num_tiles, 32 * records

    def numbers() -> NDArray[np.float32]:
        return rng.standard_normal((n, k // form.group)).astype(np.float16).astype(np.float32)

    codes = rng.integers(0, 1 << form.bits, (n, k), dtype=np.uint8)
    rows = GroupCodes(form, codes, numbers(), numbers() if form.has_min else None)
    matrix = group_matrix(form, n, k, 0)
    assert group_form(matrix) == form
    assert matrix.tile_bytes % 64 == 0 and matrix.num_bytes == num_tiles * matrix.tile_bytes
    tiles = np.zeros((num_tiles, matrix.tile_bytes), np.uint8)
    write_groups(rows, tiles)

    number = np.dtype(np.float32 if form.wide else np.float16)
    code_bytes, number_bytes = 64 * form.bits, 32 // form.group * 16 * number.itemsize
    record_bytes = code_bytes + number_bytes * (1 + form.has_min)
    for row, i in [(int(rng.integers(n)), int(rng.integers(k))) for _ in range(20)]:
        record = tiles[row // 16, record_bytes * (i // 32) :]
        at = i % 32 // 4 * 64 + row % 16 * 4 + i % 4  # in the 8-bit form
        code = record[at] if form.bits == 8 else record[at % 256] >> (4 * (at // 256)) & 15
        assert code == codes[row, i]
        for values, begin in ((rows.scales, code_bytes), (rows.mins, code_bytes + number_bytes)):
            if values is not None:
                stated = record[begin : begin + number_bytes].view(number).reshape(-1, 16)
                assert stated[i % 32 // form.group, row % 16] == values[row, i // form.group]
    back = read_group_tiles(form, tiles, k)
    np.testing.assert_array_equal(back.values(), rows.values(), strict=True)


@given(num_tiles=st.integers(1, 3), k=st.sampled_from([32, 96]), seed=SEEDS)
def test_plain_tiles_are_laid_out_as_written(num_tiles: int, k: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((16 * num_tiles, k), dtype=np.float32)
    shapes: dict[Any, tuple[tuple[int, ...], type[Any]]] = {
        "f32": ((num_tiles, k, 16), np.float32),
        "bf16": ((num_tiles, k // 2, 16, 2), np.uint16),
    }
    for form, (shape, number) in shapes.items():
        matrix = plain_matrix(form, 16 * num_tiles, k, 0)
        tiles = np.zeros((num_tiles, matrix.tile_bytes), np.uint8)
        write_plain(form, values, tiles)
        cut = tiles.view(number).reshape(shape)
        if form == "f32":
            assert cut[-1, 5, 3] == values[16 * (num_tiles - 1) + 3, 5]
            np.testing.assert_array_equal(read_plain_tiles(form, tiles, k), values)
        else:
            assert cut[-1, 2, 3, 1] == bf16_bits(values)[16 * (num_tiles - 1) + 3, 5]
            np.testing.assert_allclose(read_plain_tiles(form, tiles, k), values, rtol=2**-8)


def test_bf16_rounds_to_even_and_keeps_what_is_no_number() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32)
    assert bf16_bits(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFFFF, 0x7F80]


@given(seed=SEEDS, exponent=st.integers(-30, 10))
def test_int8_is_within_half_a_step(seed: int, exponent: int) -> None:
    values = np.random.default_rng(seed).standard_normal((4, 96), dtype=np.float32) * np.float32(2.0**exponent)
    values[1, :32] = 0
    groups = quantize(values)
    np.testing.assert_array_equal(groups.scales, groups.scales.astype(np.float16))
    error = np.abs(groups.values() - values).reshape(4, 3, 32)
    assert (error <= groups.scales[..., None] * 0.5001).all()
    assert groups.codes.min() >= 1, "-128 is not used"
    assert not groups.values()[1, :32].any()
    largest = np.abs(values).reshape(4, 3, 32).max(-1)
    assert (groups.scales <= largest / 127 * 1.001 + 2**-24).all(), "no coarser than need be"


@pytest.mark.parametrize("largest", [65510 * 127.0, -3e38, np.inf, np.nan])
def test_int8_shows_what_it_cannot_state_by_its_scale(largest: float) -> None:
    values = np.full((1, 64), 0.5, np.float32)
    values[0, 40] = largest
    assert np.isfinite(quantize(values).scales).tolist() == [[True, False]]


@pytest.mark.parametrize("dtype", GROUP_TYPES)
def test_int8_keeps_what_it_can_state(dtype: str) -> None:
    stored = random_blocks(dtype, 3, 2, seed=5)
    groups = to_int8(dtype, stored)
    want = theirs(dtype, stored)
    if dtype in ("q4_0", "q5_0", "q8_0", "iq4_nl"):
        np.testing.assert_array_equal(groups.values(), want)
    else:
        assert (np.abs(groups.values() - want) <= groups.scales.repeat(32, -1) * 0.5001).all()

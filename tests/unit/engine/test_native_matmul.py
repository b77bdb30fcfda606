"""Weights times rows: the scalar level against fp64, every other level against the scalar one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

_native = pytest.importorskip("inferloop.engine.compute.native._native")

matmul = _native.matmul
Floats = NDArray[np.float32]
Form = Literal["f32", "bf16", "group"]
TILE = 16
ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
LEVELS = ISAS[: ISAS.index(_native.best_isa()) + 1]
if "avx512_bf16" in LEVELS:
    LEVELS += ("amx_played",)  # the kernels of amx on tiles played in software

GROUPS = st.fixed_dictionaries(
    {
        "bits": st.sampled_from([4, 8]),
        "group": st.sampled_from([16, 32]),
        "offset": st.sampled_from([0, 8, 128]),
        "wide": st.booleans(),
        "has_min": st.booleans(),
        "bias": st.booleans(),
    }
)


@dataclass(frozen=True, slots=True)
class Weights:
    """In a format; `matrix` as the kernels take it; `values` [n, k] what it holds; `bias` [n] or None."""

    form: Form
    matrix: Any
    values: NDArray[np.float64]
    bias: NDArray[np.float32] | None


def aligned(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy that begins at a multiple of 64 bytes."""
    room = np.zeros(data.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + data.size] = data.ravel()
    return room[start : start + data.size]


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def tiles_of(values: NDArray[Any]) -> NDArray[Any]:
    """[n, ...] in tiles of 16, the last one filled up with zeros."""
    n = values.shape[0]
    padded = np.concatenate([values, np.zeros((-n % TILE, *values.shape[1:]), values.dtype)])
    return padded.reshape(-1, TILE, *values.shape[1:])


def float_weights(rng: np.random.Generator, form: Form, n: int, k: int, *, bias: bool = False) -> Weights:
    values = rng.standard_normal((n, k), np.float32)
    offsets = rng.standard_normal(n, np.float32) if bias else None
    if form == "f32":
        tiles: NDArray[Any] = tiles_of(values).transpose(0, 2, 1)
    else:
        bits = to_bf16(values)
        values = from_bf16(bits)
        tiles = tiles_of(bits).reshape(-1, TILE, k // 2, 2).transpose(0, 2, 1, 3)
    packed = np.ascontiguousarray(tiles)
    data = aligned(packed.reshape(-1).view(np.uint8))
    matrix = _native.matmul.Matrix(form, n, k, data, packed[0].nbytes, bias=offsets)
    return Weights(form, matrix, values.astype(np.float64), offsets)


def group_weights(
    rng: np.random.Generator,
    n: int,
    k: int,
    *,
    bits: int = 4,
    group: int = 32,
    offset: int = 0,
    wide: bool = False,
    has_min: bool = True,
    bias: bool = False,
    largest: bool = False,
) -> Weights:
    codes = np.full((n, k), 2**bits - 1, np.uint8) if largest else rng.integers(0, 2**bits, (n, k), dtype=np.uint8)
    kind = np.float32 if wide else np.float16
    scales = rng.standard_normal((n, k // group)).astype(kind)
    mins = rng.standard_normal((n, k // group)).astype(kind)
    offsets = rng.standard_normal(n, np.float32) if bias else None

    values = np.repeat(scales.astype(np.float64), group, 1) * (codes.astype(np.float64) - offset)
    if has_min:
        values += np.repeat(mins.astype(np.float64), group, 1)

    records = k // 32
    # [tile, record, j, output, 4]: inputs 4j .. 4j + 3 of every output side by side
    code_bytes = tiles_of(codes).reshape(-1, TILE, records, 8, 4).transpose(0, 2, 3, 1, 4)
    if bits == 4:
        code_bytes = code_bytes[:, :, :4] | code_bytes[:, :, 4:] << 4
    parts = [code_bytes.reshape(-1, records, 64 * bits).copy()]
    for numbers in (scales, mins)[: 2 if has_min else 1]:
        per_record = tiles_of(numbers).reshape(-1, TILE, records, 32 // group).transpose(0, 2, 3, 1)
        parts.append(np.ascontiguousarray(per_record).reshape(-1, records, 32 // group * TILE).view(np.uint8))
    tiles = np.concatenate(parts, axis=2).reshape(-(-n // TILE), -1)
    tile_bytes = -(-tiles.shape[1] // 64) * 64
    padded = np.zeros((tiles.shape[0], tile_bytes), np.uint8)
    padded[:, : tiles.shape[1]] = tiles
    matrix = _native.matmul.Matrix(
        "group", n, k, aligned(padded), tile_bytes, bits, group, offset, wide, has_min, offsets
    )
    return Weights("group", matrix, values, offsets)


def quantized(x: Floats) -> tuple[NDArray[np.int8], Floats, NDArray[np.int32]]:
    result: tuple[NDArray[np.int8], Floats, NDArray[np.int32]] = _native.rows.encode("scalar", x, "q8")
    return result


def product(isa: str, w: Weights, x: Floats, begin: int = 0, end: int | None = None) -> Floats:
    """x in the form that the matrix takes, times all of its tiles or some."""
    end = -(-len(w.values) // TILE) if end is None else end
    if w.form == "group":
        result = matmul.multiply_q8(isa, w.matrix, *quantized(x), begin, end)
    elif w.form == "bf16":
        result = matmul.multiply_bf16(isa, w.matrix, to_bf16(x), begin, end)
    else:
        result = matmul.multiply_f32(isa, w.matrix, x, begin, end)
    assert isinstance(result, np.ndarray)
    return result


def truth(w: Weights, x: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The product in fp64, and the sum of its terms' magnitudes, which bounds on rounding are multiples of."""
    if w.form == "group":
        codes, scales, _ = quantized(x)
        values = codes.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)
    elif w.form == "bf16":
        values = from_bf16(to_bf16(x)).astype(np.float64)
    else:
        values = x.astype(np.float64)
    bias = np.zeros(len(w.values)) if w.bias is None else w.bias.astype(np.float64)
    return values @ w.values.T + bias, np.abs(values) @ np.abs(w.values.T) + np.abs(bias)


def filled_up(values: NDArray[Any]) -> NDArray[Any]:
    return np.pad(values, ((0, 0), (0, -values.shape[1] % TILE)))


def matrix_of(rng: np.random.Generator, form: Form, n: int, k: int, group: Any) -> Weights:
    return group_weights(rng, n, k, **group) if form == "group" else float_weights(rng, form, n, k, bias=group["bias"])


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(["f32", "bf16", "group"]),
    m=st.integers(0, 9),
    n=st.integers(1, 70),
    records=st.integers(1, 6),
    group=GROUPS,
    seed=st.integers(0, 2**32),
)
def test_scalar_is_the_product(form: Form, m: int, n: int, records: int, group: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = matrix_of(rng, form, n, 32 * records, group)
    x = rng.standard_normal((m, 32 * records), np.float32)
    expected, size = truth(w, x)
    # Codes of 8 bits less an offset of 128 cancel: what is summed is as large as the codes themselves.
    slack = 256 if form == "group" else 1
    np.testing.assert_array_less(
        np.abs(product("scalar", w, x) - filled_up(expected)), filled_up(size) * slack * 2**-20 + 1e-30
    )


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=120, deadline=None)
@given(m=st.integers(0, 40), n=st.integers(1, 100), records=st.integers(1, 9), group=GROUPS, seed=st.integers(0, 2**32))
def test_every_level_gives_the_bits_of_scalar_for_groups(
    isa: str, m: int, n: int, records: int, group: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w = group_weights(rng, n, 32 * records, **group)
    x = rng.standard_normal((m, 32 * records), np.float32)
    got, expected = product(isa, w, x), product("scalar", w, x)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=80, deadline=None)
@given(
    form=st.sampled_from(["f32", "bf16"]),
    m=st.integers(0, 40),
    n=st.integers(1, 100),
    records=st.integers(1, 9),
    bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_level_is_the_product_of_floats(
    isa: str, form: Form, m: int, n: int, records: int, bias: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w = float_weights(rng, form, n, 32 * records, bias=bias)
    x = rng.standard_normal((m, 32 * records), np.float32)
    expected, size = truth(w, x)
    bound = filled_up(size) * (32 * records + 2) * 2**-24
    np.testing.assert_array_less(np.abs(product(isa, w, x) - filled_up(expected)), bound + 1e-30)


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=80, deadline=None)
@given(
    form=st.sampled_from(["f32", "bf16", "group"]),
    m=st.integers(1, 40),
    n=st.integers(1, 200),
    k=st.sampled_from([64, 576]),
    group=GROUPS,
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_a_result_depends_on_its_row_and_weights_alone(
    isa: str,
    form: Form,
    m: int,
    n: int,
    k: int,
    group: Any,
    seed: int,
    data: st.DataObject,
) -> None:
    rng = np.random.default_rng(seed)
    w = matrix_of(rng, form, n, k, group)
    x = rng.standard_normal((m, k), np.float32)
    whole = product(isa, w, x)
    begin = data.draw(st.integers(0, whole.shape[1] // TILE))
    end = data.draw(st.integers(begin, whole.shape[1] // TILE))
    first = data.draw(st.integers(0, m - 1))
    last = data.draw(st.integers(first, m))
    part = product(isa, w, np.ascontiguousarray(x[first:last]), begin, end)
    np.testing.assert_array_equal(part.view(np.uint32), whole[first:last, TILE * begin : TILE * end].view(np.uint32))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("form", ["f32", "bf16", "group"])
@pytest.mark.parametrize("m", [40, 97])
def test_rows_too_long_for_a_cache_give_what_each_gives_alone(isa: str, form: Form, m: int) -> None:
    """Their products are taken in parts, by inputs, and sums wait in between."""
    rng = np.random.default_rng(m)
    k = 32 * 211  # a prime: the last part is a short one
    w = matrix_of(rng, form, 40, k, {"bits": 4, "bias": False})
    x = rng.standard_normal((m, k), np.float32)
    whole = product(isa, w, x)
    for r in (0, 5, m // 2, m - 1):
        alone = product(isa, w, x[r : r + 1])
        np.testing.assert_array_equal(alone.view(np.uint32), whole[r : r + 1].view(np.uint32))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_codes_do_not_overflow(isa: str, bits: int) -> None:
    k = 8192
    w = group_weights(np.random.default_rng(0), 16, k, bits=bits, largest=True)
    for sign in (1, -1):
        x = np.full((5, k), sign, np.float32)
        expected, size = truth(w, x)
        np.testing.assert_array_less(np.abs(product(isa, w, x) - expected), size * 2**-18)


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(["f32", "bf16", "group"]),
    n=st.integers(1, 40),
    records=st.integers(1, 4),
    group=GROUPS,
    seed=st.integers(0, 2**32),
)
def test_a_row_of_weights(isa: str, form: Form, n: int, records: int, group: Any, seed: int) -> None:
    w = matrix_of(np.random.default_rng(seed), form, n, 32 * records, group)
    for output in {0, n // 2, n - 1}:
        np.testing.assert_array_equal(matmul.row(isa, w.matrix, output), w.values[output].astype(np.float32))


@pytest.mark.parametrize("isa", LEVELS)
def test_all_levels_stand_the_trial(isa: str) -> None:
    assert matmul.agree(isa, "scalar")


def test_a_level_that_this_machine_does_not_have_is_refused() -> None:
    w = float_weights(np.random.default_rng(0), "f32", 16, 32)
    with pytest.raises(ValueError, match="not a level of this machine: avx1024"):
        matmul.multiply_f32("avx1024", w.matrix, np.zeros((1, 32), np.float32), 0, 1)


def test_what_does_not_fit_is_refused() -> None:
    w = float_weights(np.random.default_rng(0), "f32", 16, 32)
    with pytest.raises(ValueError, match="rows do not fit the matrix"):
        matmul.multiply_f32("scalar", w.matrix, np.zeros((1, 64), np.float32), 0, 1)
    with pytest.raises(ValueError, match="rows do not fit the matrix"):
        matmul.multiply_bf16("scalar", w.matrix, np.zeros((1, 32), np.uint16), 0, 1)
    with pytest.raises(ValueError, match="no such tiles"):
        matmul.multiply_f32("scalar", w.matrix, np.zeros((1, 32), np.float32), 0, 2)
    with pytest.raises(ValueError, match="data does not hold all tiles"):
        matmul.Matrix("f32", 17, 32, np.zeros(2048, np.uint8), 2048)

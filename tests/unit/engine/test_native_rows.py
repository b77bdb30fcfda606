"""What happens to rows between products: the scalar level against fp64, every other level against its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

_native = pytest.importorskip("inferloop.engine.compute.native._native")

rows = _native.rows
ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
LEVELS = ISAS[: ISAS.index(_native.best_isa()) + 1]
Floats = NDArray[np.float32]
SEEDS = st.integers(0, 2**32)


def to_bf16(values: Floats) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def same_bits(got: NDArray[Any], expected: NDArray[Any]) -> None:
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


def random_rows(seed: int, m: int, k: int) -> Floats:
    """Of all sizes, some zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k), np.float32)
    x *= np.exp2(rng.integers(-20, 20, (m, 1))).astype(np.float32)
    x[rng.random((m, k)) < 0.1] = 0
    return x


@settings(max_examples=60, deadline=None)
@given(m=st.integers(0, 4), groups=st.integers(1, 9), seed=SEEDS)
def test_q8_is_within_half_a_step(m: int, groups: int, seed: int) -> None:
    x = random_rows(seed, m, 32 * groups)
    codes, scales, sums = rows.encode("scalar", x, "q8")
    grouped = x.reshape(m, groups, 32)
    np.testing.assert_array_equal(scales, np.abs(grouped).max(2, initial=0) * np.float32(1 / 127))
    step = np.repeat(scales, 32, 1).astype(np.float64)
    assert (np.abs(codes * step - x) <= 0.50001 * step).all()
    np.testing.assert_array_equal(sums, codes.reshape(m, 2 * groups, 16).sum(2, dtype=np.int32))


def test_q8_rounds_halves_to_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    codes, _, _ = rows.encode("scalar", x, "q8")
    assert codes[0, :6].tolist() == [127, 0, 2, 2, 0, -2]


def test_q8_of_nothing_is_zero_and_of_nan_is_nan() -> None:
    x = np.zeros((4, 32), np.float32)
    x[1] = 1e-38
    x[2, 3] = np.nan
    x[3, 4] = -np.inf
    codes, scales, sums = rows.encode("scalar", x, "q8")
    assert not codes.any()
    assert not sums.any()
    assert scales[:2].tolist() == [[0], [0]]
    assert np.isnan(scales[2:]).all()


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    x = np.array([[1, 1 + 2**-8, 1 + 3 * 2**-8, -1e-40, 3.4e38, np.inf, np.nan, -0.0] * 4], np.float32)
    got = from_bf16(rows.encode("scalar", x, "bf16"))
    expected = from_bf16(to_bf16(x))
    expected[np.isnan(x)] = np.nan
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(got[0, :3], np.array([1, 1, 1 + 2**-6], np.float32))


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=60, deadline=None)
@given(m=st.integers(0, 4), groups=st.integers(1, 20), form=st.sampled_from(["f32", "bf16", "q8"]), seed=SEEDS)
def test_every_level_encodes_the_same_bits(isa: str, m: int, groups: int, form: str, seed: int) -> None:
    x = random_rows(seed, m, 32 * groups)
    if m > 1:
        x[1, 5] = np.nan
        x[0, 3] = np.inf
    got, expected = rows.encode(isa, x, form), rows.encode("scalar", x, form)
    for a, b in zip(got, expected, strict=True) if form == "q8" else [(got, expected)]:
        same_bits(a, b)


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=60, deadline=None)
@given(m=st.integers(0, 4), sixteens=st.integers(1, 40), seed=SEEDS)
def test_norm(isa: str, m: int, sixteens: int, seed: int) -> None:
    x = random_rows(seed, m, 16 * sixteens)
    gain = np.random.default_rng(seed + 1).standard_normal(16 * sixteens, np.float32)
    got = rows.norm(isa, x, gain, 1e-5)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * gain
    np.testing.assert_allclose(got, expected, rtol=2e-6)
    same_bits(got, rows.norm("scalar", x, gain, 1e-5))


def activation_of(name: str, g: NDArray[np.float64]) -> NDArray[np.float64]:
    u = g if name == "silu" else 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
    with np.errstate(over="ignore"):
        result: NDArray[np.float64] = g / (1 + np.exp(-u))
    return result


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gated(isa: str, name: str) -> None:
    # All exponents, and closely where the function bends; beyond, where fp32 has no normal numbers, both are 0.
    bend = np.linspace(-80, 80, 16 * 4096, dtype=np.float32)
    sizes = np.exp2(np.linspace(-120, 6, 16 * 256)).astype(np.float32)
    gate = np.concatenate([bend, sizes, -sizes])
    up = np.random.default_rng(0).standard_normal(gate.size, np.float32)
    got = rows.gated(isa, name, gate, np.ones_like(gate))[0]
    expected = activation_of(name, gate.astype(np.float64))
    normal = np.abs(expected) > 1e-36
    ulp = np.spacing(np.abs(expected[normal]).astype(np.float32)).astype(np.float64)
    if name == "silu":
        assert (np.abs(got - expected)[normal] / ulp).max() <= 4
    else:  # what its argument is rounded by, e^u feels u times over
        assert (np.abs(got - expected)[normal] / ulp / np.maximum(1, np.abs(gate[normal]) ** 3)).max() <= 4
    assert (np.abs(got - expected)[~normal] <= 1e-36).all()
    both = rows.gated(isa, name, gate, up)
    same_bits(both[0], got * up)
    same_bits(both, rows.gated("scalar", name, gate, up))


@pytest.mark.parametrize("isa", LEVELS)
def test_gated_beyond_all_bounds(isa: str) -> None:
    gate = np.zeros(16, np.float32)
    gate[:5] = [1e30, -1e30, np.inf, np.nan, -200]
    got = rows.gated(isa, "silu", gate, np.ones(16, np.float32))[0]
    assert got[:3].tolist() == [np.float32(1e30), 0, np.inf]
    assert np.isnan(got[3])
    assert got[4:].tolist() == [0] * 12


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_soften(isa: str, cap: float) -> None:
    sizes = np.exp2(np.linspace(-120, 120, 16 * 256)).astype(np.float32)
    x = np.concatenate([np.linspace(-9 * cap, 9 * cap, 16 * 4096, dtype=np.float32), sizes, -sizes])
    got = rows.soften(isa, x, cap)[0]
    assert np.abs(got - cap * np.tanh(x.astype(np.float64) / cap)).max() <= 2**-22 * cap
    same_bits(got, rows.soften("scalar", x, cap)[0])


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=40, deadline=None)
@given(half=st.integers(0, 70), rest=st.integers(0, 9), seed=SEEDS)
def test_rotate(isa: str, half: int, rest: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    head = rng.standard_normal(2 * half + rest, np.float32)
    angles = rng.uniform(0, 6, half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    got = rows.rotate(isa, head, cos, sin)[0]
    first, second = head[:half], head[half : 2 * half]
    same_bits(got, np.concatenate([first * cos - second * sin, second * cos + first * sin, head[2 * half :]]))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("n", [0, 1, 31, 576])
def test_add(isa: str, n: int) -> None:
    x, y = np.random.default_rng(n).standard_normal((2, n), np.float32)
    same_bits(rows.add(isa, x, y)[0], x + y)


def test_levels_and_forms_that_do_not_exist_are_refused() -> None:
    x = np.zeros((1, 32), np.float32)
    with pytest.raises(ValueError, match="not a level of this machine: mmx"):
        rows.encode("mmx", x, "q8")
    with pytest.raises(ValueError, match="form is f32, bf16 or q8, not q4"):
        rows.encode("scalar", x, "q4")


@pytest.mark.parametrize("isa", LEVELS)
@settings(max_examples=40, deadline=None)
@given(sixteens=st.integers(1, 9), seed=SEEDS)
def test_softmax_and_scaled_sums(isa: str, sixteens: int, seed: int) -> None:
    """What is minus infinity takes no part, and who is far from all others takes all."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(16 * sixteens) * rng.choice([0.1, 3, 60])).astype(np.float32)
    x[1:][rng.random(x.size - 1) < 0.2] = -np.inf
    got = rows.softmax(isa, x)[0]
    expected = np.exp((x - x.max()).astype(np.float64))  # a difference in fp32 is what it is computed of
    np.testing.assert_allclose(got, expected / expected.sum(), rtol=2e-6, atol=1e-37)
    assert not got[np.isneginf(x)].any()
    same_bits(got, rows.softmax("scalar", x)[0])
    y = rng.standard_normal(x.size, np.float32)
    same_bits(rows.add_scaled(isa, got, y, 0.3)[0], got + y * np.float32(0.3))

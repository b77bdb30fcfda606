"""Native attention against fp64 over what the cache holds, and everything that a result must not depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

native: Any = pytest.importorskip("inferloop.engine.compute.native._native")
attention = native.attention

Format = Literal["bf16", "int8"]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]

ORDER = ["scalar", "avx2", "avx512", "avx512_bf16", "amx"]
LEVELS = ORDER[: ORDER.index(native.best_isa()) + 1]
FORMATS: list[Format] = ["bf16", "int8"]
BLOCK = 16
RANGE: int = attention.range
NAN_BYTE = 0xFF  # bf16 0xffff is NaN, so is a bf16 scale of it

levels = pytest.mark.parametrize("isa", LEVELS)
formats = pytest.mark.parametrize("kv", FORMATS)


def exact(isa: str, kv: Format) -> bool:
    """Whether a level repeats the scalar one bit for bit."""
    return kv == "int8" or ORDER.index(isa) < ORDER.index("avx512_bf16")


@dataclass(frozen=True, slots=True)
class Shape:
    query_heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    window: int = 0
    soft_cap: float = 0.0

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of (tokens known before, rows of the step), with all their queries, keys and values."""

    shape: Shape
    lengths: tuple[tuple[int, int], ...]
    q: tuple[Float32, ...]  # of each sequence, of all its tokens
    k: tuple[Float32, ...]
    v: tuple[Float32, ...]
    tables: tuple[NDArray[np.int32], ...]
    num_blocks: int


def aligned(shape: tuple[int, ...], byte: int = NAN_BYTE) -> Bytes:
    size = int(np.prod(shape))
    buffer = np.full(size + 64, byte, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].reshape(shape)


def make_case(shape: Shape, lengths: list[tuple[int, int]], seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    totals = [known + rows for known, rows in lengths]
    counts = [-(-total // BLOCK) for total in totals]
    num_blocks = sum(counts) + 3
    places = rng.permutation(num_blocks).astype(np.int32)
    tables = tuple(np.split(places[: sum(counts)], np.cumsum(counts)[:-1])) if counts else ()

    def numbers(heads: int, spread: float) -> tuple[Float32, ...]:
        return tuple(
            (spread * rng.standard_normal((total, heads, shape.head_dim))).astype(np.float32) for total in totals
        )

    q = numbers(shape.query_heads, 1.5)
    k, v = numbers(shape.kv_heads, 1.5), numbers(shape.kv_heads, 1.0)
    return Case(shape, tuple(lengths), q, k, v, tables, num_blocks)


def make_cache(case: Case, kv: Format, isa: str, byte: int = NAN_BYTE) -> Bytes:
    """One layer that holds everybody's tokens and is NaN elsewhere."""
    shape = case.shape
    cache = aligned((1, case.num_blocks, shape.kv_heads, attention.head_bytes(kv, shape.head_dim)), byte)
    for table, k, v in zip(case.tables, case.k, case.v, strict=True):
        attention.write(isa, kv, cache, 0, table, 0, k, v)
    return cache


def attend(case: Case, cache: Bytes, kv: Format, isa: str, num_threads: int = 1) -> Float32:
    shape = case.shape
    width = max((len(table) for table in case.tables), default=0)
    table = np.full((len(case.tables), width), -1, np.int32)
    for i, blocks in enumerate(case.tables):
        table[i, : len(blocks)] = blocks
    offsets = np.cumsum([0, *(rows for _, rows in case.lengths)]).astype(np.int32)
    first = np.array([known for known, _ in case.lengths], np.int32)
    parts = [q[known : known + rows] for q, (known, rows) in zip(case.q, case.lengths, strict=True)]
    q = np.concatenate([np.empty((0, shape.query_heads, shape.head_dim), np.float32), *parts])
    out = np.full_like(q, np.nan)
    attention.attend(
        isa, num_threads, kv, cache, 1, offsets, first, table, q, out, shape.scale, shape.window, shape.soft_cap
    )
    return out


def widen(bits: NDArray[np.uint16]) -> Float64:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def unpack(cache: Bytes, kv: Format, dim: int) -> tuple[Float64, Float64]:
    """Keys and values [block][head][16][head_dim] of one layer, from the layout that attention.h describes."""
    blocks, heads = cache.shape[:2]
    if kv == "bf16":
        halves = widen(cache.view(np.uint16)).reshape(blocks, heads, 2, 16 * dim)
        k = halves[:, :, 0].reshape(blocks, heads, dim // 2, 16, 2).transpose(0, 1, 3, 2, 4)
        v = halves[:, :, 1].reshape(blocks, heads, 8, dim, 2).transpose(0, 1, 2, 4, 3)
        return k.reshape(blocks, heads, 16, dim), v.reshape(blocks, heads, 16, dim)
    codes, scales = cache[..., : 32 * dim], widen(np.ascontiguousarray(cache[..., 32 * dim :]).view(np.uint16))
    k = codes[..., : 16 * dim].astype(np.float64).reshape(blocks, heads, dim // 4, 16, 4).transpose(0, 1, 3, 2, 4)
    v = codes[..., 16 * dim :].view(np.int8).astype(np.float64).reshape(blocks, heads, 4, dim, 4)
    k = k.reshape(blocks, heads, 16, dim) - 128
    v = v.transpose(0, 1, 2, 4, 3).reshape(blocks, heads, 16, dim)
    return k * scales[..., :16, None], v * scales[..., 16:, None]


def truth(case: Case, cache: Bytes, kv: Format) -> Float64:
    shape = case.shape
    keys, values = unpack(cache[0], kv, shape.head_dim)
    group = shape.query_heads // shape.kv_heads
    rows = [np.empty((0, shape.query_heads, shape.head_dim))]
    for table, q, (known, count) in zip(case.tables, case.q, case.lengths, strict=True):
        k = keys[table].transpose(1, 0, 2, 3).reshape(shape.kv_heads, -1, shape.head_dim)
        v = values[table].transpose(1, 0, 2, 3).reshape(shape.kv_heads, -1, shape.head_dim)
        for position in range(known, known + count):
            begin = max(0, position + 1 - shape.window) if shape.window else 0
            seen = slice(begin, position + 1)
            grouped = q[position].astype(np.float64).reshape(shape.kv_heads, group, -1)
            scores = np.einsum("hgd,hkd->hgk", grouped, k[:, seen]) * shape.scale
            if shape.soft_cap:
                scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            rows.append(np.einsum("hgk,hkd->hgd", p, v[:, seen]).reshape(1, shape.query_heads, -1))
    return np.concatenate(rows)


def tolerance(isa: str, kv: Format) -> float:
    """fp32 throughout; queries and p in 15 bits; or both in the 8 bits of bf16, with scores of up to about 10."""
    return 1e-5 if kv == "bf16" and exact(isa, kv) else 1e-3 if kv == "int8" else 0.03


def check(case: Case, kv: Format, isa: str, num_threads: int = 1) -> None:
    cache = make_cache(case, kv, isa)
    out = attend(case, cache, kv, isa, num_threads)
    np.testing.assert_allclose(out, truth(case, cache, kv), rtol=0, atol=tolerance(isa, kv))
    if exact(isa, kv):
        np.testing.assert_array_equal(out, attend(case, cache, kv, "scalar"))


SHAPES = [
    Shape(),
    Shape(4, 4, 16),
    Shape(8, 1, 80),
    Shape(14, 2, 128),
    Shape(5, 1, 96, window=40),
    Shape(6, 3, 64, window=300, soft_cap=20.0),
    Shape(2, 1, 256, soft_cap=5.0),
]
LENGTHS = [
    (0, 1),
    (0, 17),
    (14, 2),
    (15, 1),
    (16, 1),
    (0, 0),
    (63, 70),
    (RANGE - 1, 2),
    (RANGE, 1),
    (2 * RANGE - 3, 40),
]


@levels
@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_fp64(isa: str, kv: Format, shape: Shape) -> None:
    check(make_case(shape, LENGTHS), kv, isa)


@levels
@formats
@settings(max_examples=25, deadline=None)
@given(
    shape=st.builds(
        lambda kv_heads, group, dim, window, cap: Shape(kv_heads * group, kv_heads, 16 * dim, window, cap),
        st.integers(1, 3),
        st.integers(1, 8),
        st.integers(1, 9),
        st.sampled_from([0, 0, 1, 7, 16, 100, 257]),
        st.sampled_from([0.0, 0.0, 10.0]),
    ),
    lengths=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 40)), max_size=5),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_fp64_whatever_the_plan(
    isa: str, kv: Format, shape: Shape, lengths: list[tuple[int, int]], num_threads: int, seed: int
) -> None:
    check(make_case(shape, lengths, seed), kv, isa, num_threads)


@levels
@formats
@pytest.mark.parametrize("shape", [Shape(), Shape(8, 1, 80, window=100), Shape(4, 2, 32, soft_cap=10.0)], ids=str)
def test_a_row_does_not_depend_on_its_chunk(isa: str, kv: Format, shape: Shape) -> None:
    """Not on where it begins and ends, nor on neighbours in the step, nor on the number of threads."""
    total = 2 * RANGE + 37
    case = make_case(shape, [(0, total)])
    cache = make_cache(case, kv, isa)
    whole = attend(case, cache, kv, isa)
    beside = [(0, 5), (RANGE + 3, 1), (100, 64)]
    for known in (0, 1, 15, 16, 63, 200, RANGE - 1, RANGE, 2 * RANGE, total - 1):
        for rows in (1, 2, 7, 33, 200):
            lengths = (known, min(rows, total - known))
            part = attend(replace(case, lengths=(lengths,)), cache, kv, isa, 1 + rows % 2)
            np.testing.assert_array_equal(part, whole[known : known + lengths[1]])
    crowd = make_case(shape, [*beside, (0, total)], seed=1)
    crowd = replace(crowd, q=(*crowd.q[:3], *case.q), k=(*crowd.k[:3], *case.k), v=(*crowd.v[:3], *case.v))
    for num_threads in (1, 2):
        out = attend(crowd, make_cache(crowd, kv, isa), kv, isa, num_threads)
        np.testing.assert_array_equal(out[-total:], whole)


@levels
@formats
def test_a_long_context_is_shared_by_threads_and_stays_the_same(isa: str, kv: Format) -> None:
    case = make_case(Shape(), [(5 * RANGE + 7, 1), (3, 1)])
    cache = make_cache(case, kv, isa)
    alone = attend(case, cache, kv, isa, 1)
    np.testing.assert_allclose(alone, truth(case, cache, kv), rtol=0, atol=tolerance(isa, kv))
    for num_threads in (2, 3, 8):
        np.testing.assert_array_equal(attend(case, cache, kv, isa, num_threads), alone)


@levels
@formats
def test_what_is_not_the_sequences_own_does_not_leak(isa: str, kv: Format) -> None:
    """Other blocks, and tokens beyond the context in its last block, may hold anything."""
    case = make_case(Shape(), [(known, 1) for known in range(17)] + [(known, 3) for known in range(30, 48)])
    results = [attend(case, make_cache(case, kv, isa, byte), kv, isa) for byte in (0, 0x55, 0x7F, 0x80, NAN_BYTE)]
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@levels
@formats
def test_blocks_before_the_window_are_not_read(isa: str, kv: Format) -> None:
    case = make_case(Shape(window=50), [(700, 1), (400, 20)])
    cache = make_cache(case, kv, isa)
    before = attend(case, cache, kv, isa)
    tables = tuple(table.copy() for table in case.tables)
    tables[0][: (701 - 50) // BLOCK] = -1
    tables[1][: (401 - 50) // BLOCK] = -1
    np.testing.assert_array_equal(attend(replace(case, tables=tables), cache, kv, isa, 2), before)


@levels
def test_bf16_is_written_to_nearest_even(isa: str) -> None:
    """Ties, both signs, infinities, NaN and subnormal numbers among them; equal to the scalar level's."""
    import torch

    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 2**32, (48, 2, 64), dtype=np.uint64).astype(np.uint32)
    numbers[::2] &= 0xFFFF0000
    numbers[::2] |= 0x8000
    k = numbers.view(np.float32)
    k[0, 0, :6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40]
    v = k[::-1].copy()
    case = replace(make_case(Shape(2, 2, 64), [(0, 48)]), k=(k,), v=(v,))
    cache = make_cache(case, "bf16", isa)
    keys, values = unpack(cache[0], "bf16", 64)
    for got, given_ in ((keys, k), (values, v)):
        flushed = np.where(np.abs(given_) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), given_), given_)
        expected = torch.from_numpy(flushed).bfloat16().double().numpy()
        np.testing.assert_array_equal(got[case.tables[0]].transpose(0, 2, 1, 3).reshape(48, 2, 64), expected)
    np.testing.assert_array_equal(cache, make_cache(case, "bf16", "scalar"))


@levels
def test_int8_is_written_within_half_a_step(isa: str) -> None:
    shape = Shape(2, 2, 64)
    case = make_case(shape, [(0, 40)])
    k, v = case.k[0].copy(), case.v[0].copy()
    k[3, 0], v[4, 1], v[5, 0] = 0.0, 0.0, 1e-39
    k *= np.exp(np.random.default_rng(1).uniform(-20, 20, (40, 2, 1))).astype(np.float32)
    case = replace(case, k=(k,), v=(v,))
    cache = make_cache(case, "int8", isa)
    keys, values = unpack(cache[0], "int8", 64)
    for got, given_ in ((keys, k), (values, v)):
        mine = got[case.tables[0]].transpose(0, 2, 1, 3).reshape(48, 2, 64)[:40]
        most = np.abs(given_).max(-1, keepdims=True).astype(np.float64)
        assert (np.abs(mine - given_) <= 0.505 * most / 127 + 1e-38).all()
    np.testing.assert_array_equal(cache, make_cache(case, "int8", "scalar"))


@levels
@formats
def test_writing_token_by_token_is_writing_at_once(isa: str, kv: Format) -> None:
    case = make_case(Shape(), [(0, 45)])
    whole = make_cache(case, kv, isa)
    cache = aligned(whole.shape)
    for begin, end in ((0, 1), (1, 14), (14, 33), (33, 34), (34, 45)):
        attention.write(isa, kv, cache, 0, case.tables[0], begin, case.k[0][begin:end], case.v[0][begin:end])
    np.testing.assert_array_equal(cache, whole)


@levels
@formats
def test_large_scores_neither_overflow_nor_vanish(isa: str, kv: Format) -> None:
    """One key outweighs all others, or all weigh the same."""
    case = make_case(Shape(), [(300, 1), (0, 20)])
    for factor in (0.0, 1e4):
        scaled = replace(case, q=tuple((factor * q).astype(np.float32) for q in case.q))
        cache = make_cache(scaled, kv, isa)
        out = attend(scaled, cache, kv, isa)
        expected = truth(scaled, cache, kv)
        assert np.isfinite(out).all()
        if factor == 0:
            np.testing.assert_allclose(out, expected, rtol=0, atol=0.01 if not exact(isa, kv) else 1e-4)
        else:  # which one wins is sure only where the two best are not close
            close = np.abs(out - expected).max(-1) < 0.05
            assert close.mean() > 0.9


@given(
    num_threads=st.integers(1, 16),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 8)),
    rows=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 20 * RANGE)), min_size=1, max_size=6),
    window=st.sampled_from([0, 0, 100, 5 * RANGE]),
)
@settings(max_examples=200)
def test_what_is_put_down_of_long_contexts_is_bounded_before_a_step(
    num_threads: int, heads: tuple[int, int], rows: list[tuple[int, int]], window: int
) -> None:
    kv_heads, group = heads
    offsets = np.cumsum([0, *(num for num, _ in rows)], dtype=np.int32)
    first = np.array([position for _, position in rows], np.int32)
    taken = attention.partial_bytes(num_threads, kv_heads, group, 64, offsets, first, window)
    num_positions = max(num + position for num, position in rows)
    assert taken <= native.most_partial_bytes(num_threads, group, 64, num_positions)
    assert (taken == 0) or num_positions > RANGE


def test_one_long_context_is_what_takes_most() -> None:
    """32 rows of one KV head at the end of 64 ranges, divided among all threads: one of as many as there may be."""
    taken = attention.partial_bytes(8, 1, 3, 64, np.array([0, 32], np.int32), np.array([64 * RANGE - 32], np.int32), 0)
    assert taken == 64 * 32 * 3 * (64 + 16) * 4
    assert native.most_partial_bytes(8, 3, 64, 64 * RANGE) == 8 * 4 * taken
    assert native.most_partial_bytes(8, 3, 64, RANGE) == 0

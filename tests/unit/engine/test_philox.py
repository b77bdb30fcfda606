"""The counter RNG against its published vectors, against its own definition, and torch against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferloop.engine.compute import philox
from inferloop.engine.compute.torch import noise

# Random123 known-answer vectors for philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (np.array([v], np.uint64) for v in counter)
    k0, k1 = (np.array([v], np.uint64) for v in key)
    assert tuple(int(w[0]) for w in philox.philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def test_an_entry_is_the_documented_word_of_the_documented_counter() -> None:
    seed, position, token = 0x123456789ABCDEF0, 2**33 + 5, 49151
    c0, c1, c2, c3 = (np.array([v], np.uint64) for v in (5, 2, 0, token // 4))
    key = (np.array([0x9ABCDEF0], np.uint64), np.array([0x12345678], np.uint64))
    word = int(philox.philox4x32((c0, c1, c2, c3), key)[token % 4][0])
    u = (2 * (word >> 9) + 1) * 2.0**-24
    assert philox.gumbel([seed], [position], [token])[0] == pytest.approx(-np.log(-np.log(u)), rel=1e-5)


def test_a_subset_has_the_noise_it_has_among_all() -> None:
    everything = philox.gumbel(7, 3, np.arange(1000))
    some = np.array([999, 0, 17, 18])
    assert (philox.gumbel(7, 3, some) == everything[some]).all()
    seed, position = 2**63 + 5, 2**35 + 1
    assert (philox.gumbel_all(seed, position, 1001) == philox.gumbel(seed, position, np.arange(1001))).all()


def test_log_is_accurate_to_the_last_bits() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(6e-8, 1, 20000), rng.uniform(1, 17, 20000), 1 - 2.0 ** -np.arange(1, 24)])
    x = x.astype(np.float32)
    assert np.abs(philox.log32(x) - np.log(x.astype(np.float64))).max() < 1e-6
    near_one = (1 - np.arange(1, 500, 2) * 2.0**-24).astype(np.float32)
    exact = np.log(near_one.astype(np.float64))
    assert (np.abs(philox.log32(near_one) / exact - 1) < 3e-7).all()


def test_noise_is_gumbel_and_within_its_bounds() -> None:
    g = philox.gumbel(11, np.arange(200)[:, None], np.arange(1000)[None, :]).astype(np.float64)
    assert g.mean() == pytest.approx(0.5772, abs=0.01)
    assert g.var() == pytest.approx(np.pi**2 / 6, rel=0.02)
    ends = np.array([2.0**-24, 1 - 2.0**-24], np.float32)
    low, high = -philox.log32(-philox.log32(ends))
    assert philox.GUMBEL_MIN <= low < philox.GUMBEL_MIN + 1e-3
    assert philox.GUMBEL_MAX - 1e-3 < high <= philox.GUMBEL_MAX


def test_torch_equals_numpy_bit_for_bit() -> None:
    rng = np.random.default_rng(3)
    seeds = rng.integers(0, 2**64, 64, dtype=np.uint64)
    positions = rng.integers(0, 2**40, 64, dtype=np.int64)
    ids = rng.integers(0, 2**18, 64, dtype=np.int64)
    ours = philox.gumbel(seeds[:, None], positions[:, None], ids[None, :], draw=2)
    theirs = noise.gumbel(
        torch.from_numpy(seeds.view(np.int64))[:, None],
        torch.from_numpy(positions)[:, None],
        torch.from_numpy(ids)[None, :],
        draw=2,
    )
    assert (ours.view(np.int32) == theirs.numpy().view(np.int32)).all()

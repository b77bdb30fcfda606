"""The counter-based random numbers of sampling, in numpy. Every runner must repeat them bit for bit.

Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011).

The noise of vocabulary entry v, for the token that will stand at absolute position p of a request (the prompt's first
token stands at 0), draw number d (0 for ordinary sampling), under a 64-bit seed:

    key      = (seed mod 2^32, seed div 2^32)
    counter  = (p mod 2^32, p div 2^32, d, v div 4)
    w        = word number (v mod 4) of philox4x32_10(counter, key)
    u        = (2 * (w div 2^9) + 1) * 2^-24          exact in fp32, strictly between 0 and 1
    gumbel   = -log32(-log32(u))

so the noise of any subset of the vocabulary can be had alone. The sampled token is the one with the largest
logit / temperature + gumbel among those that top-k, top-p and min-p left over; the smallest id wins a tie.

log32 is fixed down to the rounding, because libraries differ in the last bit of a logarithm. All in fp32, every
operation rounded to nearest, nothing contracted into a fused multiply-add:

    x = 2^e * m with 1 <= m < 2;  if m > 1.41421356: m := m * 0.5, e := e + 1
    f = m - 1;  s = f / (f + 2);  z = s * s
    r = ((z * 2/9 + 2/7) * z + 2/5) * z + 2/3
    log32(x) = e * ln 2 + (s * 2 + (s * z) * r)       constants rounded to fp32

The noise lies in [GUMBEL_MIN, GUMBEL_MAX], so an entry that is more than GUMBEL_MAX - GUMBEL_MIN below the largest
logit / temperature can never win and needs no noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
GUMBEL_MIN = -2.8116
GUMBEL_MAX = 16.6356

SQRT2 = 1.41421356
LN2 = 0.6931471805599453
LOG_SERIES = (2 / 9, 2 / 7, 2 / 5, 2 / 3)
"""Coefficients of z^3, z^2, z^1, z^0 in r."""

_Words = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: _Words, key: tuple[NDArray[np.uint64], NDArray[np.uint64]]) -> _Words:
    """Ten rounds. Words are below 2**32 in uint64 arrays that broadcast together; nothing is mutated."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        p0, p1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + np.uint64(WEYL[0])) & _LOW, (k1 + np.uint64(WEYL[1])) & _LOW
    return c0, c1, c2, c3


def log32(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The logarithm defined above, for positive normal fp32 values."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    exponent = (bits >> 23) - 127
    m = ((bits & 0x007FFFFF) | 0x3F800000).view(np.float32)
    high = m > np.float32(SQRT2)
    m = np.where(high, m * np.float32(0.5), m)
    e = (exponent + high).astype(np.float32)
    f = m - np.float32(1)
    s = f / (f + np.float32(2))
    z = s * s
    a, b, c, d = (np.float32(v) for v in LOG_SERIES)
    r = ((z * a + b) * z + c) * z + d
    value: NDArray[np.float32] = e * np.float32(LN2) + (s * np.float32(2) + (s * z) * r)
    return value


def gumbel(seed: ArrayLike, position: ArrayLike, token_id: ArrayLike, draw: int = 0) -> NDArray[np.float32]:
    """Noise for the given entries; the three arrays (seeds 0 <= s < 2**64) broadcast together."""
    seeds, positions = np.asarray(seed, np.uint64), np.asarray(position, np.uint64)
    ids = np.asarray(token_id, np.uint64)
    counter = (positions & _LOW, positions >> _SHIFT, np.asarray(draw, np.uint64), ids >> np.uint64(2))
    words = philox4x32(counter, (seeds & _LOW, seeds >> _SHIFT))
    lane = (ids & np.uint64(3)).astype(np.intp)
    return _noise(np.choose(lane, np.broadcast_arrays(*words)))


def gumbel_all(seed: int, position: int, vocab_size: int) -> NDArray[np.float32]:
    """`gumbel` of ids 0 .. vocab_size - 1 for draw 0, at a quarter of the work: each counter's four words are used."""
    block = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    same = [np.full_like(block, v) for v in (position & 0xFFFFFFFF, position >> 32, 0)]
    key = (np.array(seed & 0xFFFFFFFF, np.uint64), np.array(seed >> 32, np.uint64))
    words = philox4x32((same[0], same[1], same[2], block), key)
    return _noise(np.stack(words, -1).reshape(-1)[:vocab_size])


def _noise(w: NDArray[np.uint64]) -> NDArray[np.float32]:
    u = (((w >> np.uint64(9)) << np.uint64(1)) | np.uint64(1)).astype(np.uint32).astype(np.float32)
    noise: NDArray[np.float32] = -log32(-log32(u * np.float32(2.0**-24)))
    return noise

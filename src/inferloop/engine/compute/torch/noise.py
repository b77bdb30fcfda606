"""The noise of engine.compute.philox on any torch device, in int64 arithmetic; equal to numpy's bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from inferloop.engine.compute.philox import LN2, LOG_SERIES, MULTIPLIERS, NUM_ROUNDS, SQRT2, WEYL

_LOW = 0xFFFFFFFF


def gumbel(seed: Tensor, position: Tensor, token_id: Tensor, draw: int = 0) -> Tensor:
    """fp32 noise for the given entries. int64 tensors that broadcast together; a seed's bits are taken as unsigned."""
    c0, c1, c2, c3 = position & _LOW, position >> 32, torch.full_like(position, draw), token_id >> 2
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(NUM_ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    lane = token_id & 3
    w = torch.where(lane < 2, torch.where(lane == 0, c0, c1), torch.where(lane == 2, c2, c3))
    u = ((w >> 9) * 2 + 1).to(torch.float32) * 2.0**-24
    return -log32(-log32(u))


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, without leaving the signed 64-bit range."""
    low_part = (b & 0xFFFF) * a
    high_part = (b >> 16) * a + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def log32(x: Tensor) -> Tensor:
    """The logarithm that engine.compute.philox defines, operation by operation."""
    bits = x.view(torch.int32)
    m = ((bits & 0x007FFFFF) | 0x3F800000).view(torch.float32)
    high = m > SQRT2
    m = torch.where(high, m * 0.5, m)
    e = ((bits >> 23) - 127 + high).to(torch.float32)
    f = m - 1
    s = f / (f + 2)
    z = s * s
    a, b, c, d = LOG_SERIES
    r = ((z * a + b) * z + c) * z + d
    return e * LN2 + (s * 2 + (s * z) * r)

"""Rotary embedding on tensors (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferloop.engine.compute.rope import rope_tables as numpy_tables
from inferloop.models.headers import RopeSpec


def rope_tables(
    spec: RopeSpec, num_positions: int, context_length: int, factors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """fp32 (cos, sin), each (num_positions, dim), ready for `apply_rope`: the sine's first half is negated."""
    divisors = None if factors is None else factors.cpu().float().numpy()
    cos, sin = map(torch.from_numpy, numpy_tables(spec, num_positions, context_length, divisors))
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (tokens, heads, head_dim) with pairs (i, i + dim / 2); cos and sin are (tokens, 1, dim).

    Dimensions beyond `dim` pass through.
    """
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([apply_rope(x[..., :dim], cos, sin), x[..., dim:]], -1)
    swapped = torch.unflatten(x, -1, (2, dim // 2)).flip(-2).flatten(-2)
    return (x * cos).addcmul_(swapped, sin)

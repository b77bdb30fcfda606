"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) and its context extensions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inferloop.models.headers import RopeSpec


def rope_tables(
    spec: RopeSpec, num_positions: int, context_length: int, factors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """fp32 (cos, sin), each (num_positions, dim), ready for `apply_rope`: the sine's first half is negated."""
    frequencies = inverse_frequencies(spec, context_length)
    if factors is not None:
        frequencies = frequencies / factors.cpu().float()
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    scale = _attention_factor(spec)
    cos, sin = angles.cos() * scale, angles.sin() * scale
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


def inverse_frequencies(spec: RopeSpec, context_length: int) -> Tensor:
    """fp32, dim / 2 values, the extension applied."""
    if spec.kind == "dynamic":
        return _plain(_ntk_theta(spec, context_length), spec.dim)
    frequencies = _plain(spec.theta, spec.dim)
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, frequencies, context_length)
    if spec.kind == "yarn":
        return _yarn(spec, frequencies, context_length)
    return frequencies


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _ntk_theta(spec: RopeSpec, context_length: int) -> float:
    """NTK-aware base for the longest context that is served, so that it does not change while a sequence grows."""
    original = spec.original_context_length or context_length
    if context_length <= original:
        return spec.theta
    stretch: float = (spec.factor * context_length / original - (spec.factor - 1)) ** (spec.dim / (spec.dim - 2))
    return spec.theta * stretch


def _llama3(spec: RopeSpec, frequencies: Tensor, context_length: int) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    original = spec.original_context_length or context_length
    wavelengths = 2 * math.pi / frequencies
    keep = (original / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    between = (1 - keep) * frequencies / spec.factor + keep * frequencies
    stretched = torch.where(wavelengths > original / spec.low_freq_factor, frequencies / spec.factor, between)
    return torch.where(wavelengths < original / spec.high_freq_factor, frequencies, stretched)


def _yarn(spec: RopeSpec, frequencies: Tensor, context_length: int) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071), section 3.2: a ramp from kept to interpolated dimensions."""
    original = spec.original_context_length or context_length

    def dimension_of(num_rotations: float) -> float:
        return spec.dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = max(math.floor(dimension_of(spec.beta_fast)), 0)
    high = min(math.ceil(dimension_of(spec.beta_slow)), spec.dim - 1)
    ramp = ((torch.arange(spec.dim // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / spec.factor * ramp + frequencies * (1 - ramp)


def _attention_factor(spec: RopeSpec) -> float:
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    return 0.1 * math.log(spec.factor) + 1.0 if spec.factor > 1 else 1.0

"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) and its context extensions."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from inferloop.core.errors import ModelFileError
from inferloop.models.headers import RopeSpec

Float32 = NDArray[np.float32]


def rope_tables(
    spec: RopeSpec, num_positions: int, context_length: int, factors: Float32 | None = None
) -> tuple[Float32, Float32]:
    """fp32 (cos, sin), each [num_positions][dim / 2], to rotate pairs (i, i + dim / 2) by; `factors` are divisors of
    the inverse frequencies. Angles are rounded to fp32, as in the code that models are trained with. Raises
    ModelFileError for numbers of which nothing finite comes."""
    try:
        with np.errstate(all="ignore"):
            frequencies = inverse_frequencies(spec, context_length)
            if factors is not None:
                frequencies = frequencies / factors
            angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies).astype(np.float64)
            scale = _attention_factor(spec)
            cos, sin = (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)
    except (ArithmeticError, ValueError) as problem:
        raise ModelFileError(f"a model's rotary embedding cannot be computed ({problem}): {spec}") from problem
    if not (np.isfinite(cos).all() and np.isfinite(sin).all()):
        raise ModelFileError(f"a model's rotary embedding has numbers that are not finite: {spec}")
    return cos, sin


def inverse_frequencies(spec: RopeSpec, context_length: int) -> Float32:
    """dim / 2 values, the extension applied."""
    theta = _ntk_theta(spec, context_length) if spec.kind == "dynamic" else spec.theta
    frequencies: Float32 = (1.0 / theta ** (np.arange(0, spec.dim, 2) / spec.dim)).astype(np.float32)
    if spec.kind == "linear":
        return frequencies / np.float32(spec.factor)
    if spec.kind == "llama3":
        return _llama3(spec, frequencies, context_length)
    if spec.kind == "yarn":
        return _yarn(spec, frequencies, context_length)
    return frequencies


def _ntk_theta(spec: RopeSpec, context_length: int) -> float:
    """NTK-aware base for the longest context that is served, so that it does not change while a sequence grows."""
    original = spec.original_context_length or context_length
    if context_length <= original:
        return spec.theta
    stretch: float = (spec.factor * context_length / original - (spec.factor - 1)) ** (spec.dim / (spec.dim - 2))
    return spec.theta * stretch


def _llama3(spec: RopeSpec, frequencies: Float32, context_length: int) -> Float32:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    original = spec.original_context_length or context_length
    wavelengths = 2 * math.pi / frequencies
    keep = (original / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    between = (1 - keep) * frequencies / spec.factor + keep * frequencies
    stretched = np.where(wavelengths > original / spec.low_freq_factor, frequencies / spec.factor, between)
    kept = wavelengths < original / spec.high_freq_factor
    return np.where(kept, frequencies, stretched).astype(np.float32, copy=False)


def _yarn(spec: RopeSpec, frequencies: Float32, context_length: int) -> Float32:
    """YaRN (https://arxiv.org/abs/2309.00071), section 3.2: a ramp from kept to interpolated dimensions."""
    original = spec.original_context_length or context_length

    def dimension_of(num_rotations: float) -> float:
        return spec.dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = max(math.floor(dimension_of(spec.beta_fast)), 0)
    high = min(math.ceil(dimension_of(spec.beta_slow)), spec.dim - 1)
    ramp = ((np.arange(spec.dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3)).clip(0, 1)
    out: Float32 = frequencies / spec.factor * ramp + frequencies * (1 - ramp)
    return out


def _attention_factor(spec: RopeSpec) -> float:
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    return 0.1 * math.log(spec.factor) + 1.0 if spec.factor > 1 else 1.0

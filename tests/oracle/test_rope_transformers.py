"""Rotary tables of every kind against those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inferloop.engine.compute.rope import inverse_frequencies, rope_tables
from inferloop.engine.compute.torch.layers.rope import apply_rope
from inferloop.engine.compute.torch.layers.rope import rope_tables as torch_tables
from inferloop.models.headers import RopeSpec

DIM, CONTEXT = 64, 8192
SPECS: dict[str, tuple[RopeSpec, dict[str, Any]]] = {
    "none": (RopeSpec(1e5, DIM), {"rope_type": "default"}),
    "linear": (RopeSpec(1e4, DIM, "linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (RopeSpec(1e4, DIM, "dynamic", 2.0, 2048), {"rope_type": "dynamic", "factor": 2.0}),
    "llama3": (
        RopeSpec(5e5, DIM, "llama3", 32.0, 2048, low_freq_factor=1.0, high_freq_factor=4.0),
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "yarn": (RopeSpec(1e6, DIM, "yarn", 4.0, 2048), {"rope_type": "yarn", "factor": 4.0}),
}


def theirs(kind: str) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, and what cos and sin are multiplied by."""
    spec, parameters = SPECS[kind]
    original = spec.original_context_length or CONTEXT
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        head_dim=DIM,
        max_position_embeddings=original if kind == "dynamic" else CONTEXT,
        rope_parameters={
            **parameters,
            "rope_theta": spec.theta,
            **({"original_max_position_embeddings": original} if kind in ("llama3", "yarn") else {}),
        },
    )
    if kind == "none":
        return 1.0 / spec.theta ** (torch.arange(0, DIM, 2).float() / DIM), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=CONTEXT)
    return frequencies, float(scale)


@pytest.mark.parametrize("kind", SPECS)
def test_tables_are_theirs(kind: str) -> None:
    frequencies, scale = theirs(kind)
    ours = inverse_frequencies(SPECS[kind][0], CONTEXT)
    np.testing.assert_allclose(ours, frequencies.numpy(), rtol=4e-7)
    cos, sin = rope_tables(SPECS[kind][0], 300, CONTEXT)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == sin.shape == (300, DIM // 2)
    angles = torch.outer(torch.arange(300).double(), frequencies.double()).numpy()
    np.testing.assert_allclose(cos, np.cos(angles) * scale, atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(angles) * scale, atol=1e-4)


def test_factors_divide_the_frequencies() -> None:
    spec, factors = RopeSpec(1e4, 8), np.array([1, 2, 4, 8], np.float32)
    cos, sin = rope_tables(spec, 5, 64, factors)
    angles = np.outer(np.arange(5), [1, 0.1 / 2, 0.01 / 4, 0.001 / 8])
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)


def test_a_rotated_pair_turns_by_its_angle() -> None:
    spec = RopeSpec(1e4, 8)
    cos, sin = torch_tables(spec, 4, 64, None)
    x = torch.randn(1, 2, 10, generator=torch.Generator().manual_seed(0))
    turned = apply_rope(x, cos[3][None, None], sin[3][None, None])
    for i, angle in enumerate((3, 0.3, 0.03, 0.003)):
        pair = torch.complex(x[..., i], x[..., i + 4]) * np.exp(1j * angle)
        torch.testing.assert_close(turned[..., i], pair.real, atol=1e-5, rtol=0)
        torch.testing.assert_close(turned[..., i + 4], pair.imag, atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[..., 8:], x[..., 8:], atol=0, rtol=0)

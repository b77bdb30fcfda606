"""Numbers of a rotary embedding that a file may hold and nothing can be rotated by."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.rope import rope_tables
from inferloop.models.headers import RopeSpec, rope_ranges

SOUND: dict[str, Any] = {"theta": 10_000.0, "dim": 16, "original_context_length": 32}
FACTORS = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("wrong", "factors"),
    [
        ({"kind": "yarn", "theta": 1.0}, None),
        ({"kind": "yarn", "theta": -3.0}, None),
        ({"kind": "yarn", "beta_fast": 0.0}, None),
        ({"kind": "yarn", "beta_slow": -1.0}, None),
        ({"kind": "yarn", "beta_fast": 1e308, "theta": 1.0000001}, None),
        ({"kind": "linear", "factor": 1e-300}, None),
        ({"kind": "llama3", "low_freq_factor": 1e-300, "high_freq_factor": 1e-300, "theta": 1e-300}, None),
        ({"theta": 0.0}, None),
        ({}, 0 * FACTORS),
        ({}, np.nan * FACTORS),
    ],
)
def test_what_gives_nothing_finite_is_refused_with_its_numbers(wrong: dict[str, Any], factors: Any) -> None:
    with pytest.raises(ModelFileError, match=r"rotary embedding .*RopeSpec\(theta="):
        rope_tables(RopeSpec(**SOUND | wrong), 64, 64, factors)


@pytest.mark.parametrize("kind", ["none", "linear", "dynamic", "yarn", "llama3"])
def test_sound_numbers_are_rotated_by(kind: Any) -> None:
    cos, sin = rope_tables(RopeSpec(**SOUND, kind=kind, factor=2.0), 64, 64, FACTORS)
    np.testing.assert_allclose(np.hypot(cos, sin), np.hypot(cos, sin)[0, 0], rtol=1e-5)


@pytest.mark.parametrize("kind", ["none", "linear", "dynamic", "yarn", "llama3"])
def test_what_headers_let_through_is_finite(kind: Any) -> None:
    """At every corner of what they do."""
    bands = [(1e-3, 1e-3 * 1.001), (1e-3, 1e6), (1e6 / 1.001, 1e6)]
    for theta, factor, attention, (low, high), original, dim in product(
        rope_ranges.THETA, rope_ranges.FACTOR, rope_ranges.ATTENTION, bands, (1, 2**32), (4, 256)
    ):
        assert rope_ranges.BAND[0] <= low < high <= rope_ranges.BAND[1]
        spec = RopeSpec(theta, dim, kind, factor, original, low, high, high, low, attention)
        for context in (1, 2**32):
            rope_tables(spec, 8, context)

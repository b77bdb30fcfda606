"""Names of the ways to run a model, and what all of them must agree on."""

from __future__ import annotations

import pytest
from lab.modes import Mode


@pytest.mark.parametrize(
    "name", ["torch-bf16", "torch-bf16x2", "torch-deterministic", "native-stored", "native-int8/int8@avx2"]
)
def test_known_modes(name: str) -> None:
    assert Mode(name).name == name


@pytest.mark.parametrize(
    "name", ["torch", "torch-bf16x1", "native", "native-q4", "native-int8/fp8", "native-int8@sse", "native-bf16/"]
)
def test_unknown_modes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no mode"):
        Mode(name)

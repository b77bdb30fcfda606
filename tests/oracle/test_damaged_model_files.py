"""Damaged model files end in a typed error or in a model that runs; longer with `python -m lab.fuzz_files`."""

from __future__ import annotations

import pytest
from lab.fuzz_files.__main__ import run


@pytest.mark.parametrize(("kind", "num"), [("gguf", 150), ("directory", 150)])
def test_damaged_files_end_in_a_typed_error_or_a_model(kind: str, num: int) -> None:
    tried, outcomes, bugs = run(kind, 7, 600, num)
    assert bugs == []
    assert tried == num
    assert 0 < outcomes["success"] < num

"""Damaged files end in a typed error or in what computes a few tokens; longer with `python -m lab.fuzz_files`."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.fuzz_files.__main__ import run
from lab.fuzz_files.use import USES, judge
from lab.fuzz_files.worker import make, rng_of


@pytest.mark.parametrize(("kind", "num"), [("gguf", 100), ("directory", 100)])
def test_damaged_files_end_in_a_typed_error_or_a_model(kind: str, num: int) -> None:
    tried, outcomes, bugs = run(kind, 7, 600, num)
    assert bugs == []
    assert tried == num
    assert 0 < outcomes["success"] < num


@pytest.mark.parametrize("kind", ["torch", "adapter"])
def test_in_torch_and_as_adapters_too(kind: str, tmp_path: Path) -> None:
    """In this process, for whose sake there are few."""
    write = make(kind, tmp_path)
    found = [judge(write(rng_of(7, number)), USES[kind]) for number in range(80)]
    assert [outcome.bug for outcome in found if outcome.bug] == []
    assert {outcome.error is None for outcome in found} == {True, False}

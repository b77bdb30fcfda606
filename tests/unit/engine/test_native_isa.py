"""The bound of the instruction set, as a process of its own meets it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_native = pytest.importorskip("inferloop.engine.compute.native._native")

ASK = """
from inferloop.engine.compute.native import _native
try:
    print(_native.best_isa())
except ValueError as error:
    print("refused:", error)
"""


def best_under(bound: str) -> str:
    environ = {**os.environ, "INFERLOOP_MAX_CPU_ISA": bound}
    return subprocess.run([sys.executable, "-c", ASK], env=environ, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("bound", ["scalar", "avx2", "amx"])
def test_nothing_runs_above_the_bound_or_the_machine(bound: str) -> None:
    levels = ["scalar", "avx2", "avx512", "avx512_bf16", "amx"]
    best = best_under("")
    assert best_under(bound).strip() == min(bound, best.strip(), key=levels.index)


def test_a_name_that_is_none_is_refused() -> None:
    assert "refused: INFERLOOP_MAX_CPU_ISA is sse9" in best_under("sse9")

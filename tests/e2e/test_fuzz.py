"""Hostile requests from the document that describes the server; `python -m lab.fuzz` alone goes on for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nothing_that_the_document_allows_or_forbids_is_a_fault() -> None:
    command = [sys.executable, "-m", "lab.fuzz", "--examples", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]

"""The floors of the house are enforced, not hoped for."""

from __future__ import annotations

from pathlib import Path

from importlinter import cli

ROOT = Path(__file__).resolve().parent.parent


def test_imports_point_down_only() -> None:
    exit_code = cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, verbose=False)
    assert exit_code == 0, "lint-imports names the broken import above"

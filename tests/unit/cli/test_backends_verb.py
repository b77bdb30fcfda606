"""What `inferloop backends` tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferloop.cli import wire
from inferloop.cli.main import app

RUNNER = CliRunner()


def told(*words: str) -> dict[str, Any]:
    result = RUNNER.invoke(app, ["backends", "--json", *words])
    assert result.exit_code == 0, result.output
    return {row["name"]: row for row in json.loads(result.stdout)["backends"]}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_all_that_can_be_launched_are_told() -> None:
    rows = told()
    assert tuple(rows) == wire.LAUNCHABLE
    assert rows["embedded"]["installed"] and not rows["trtllm"]["installed"]
    assert rows["sglang"]["verified"].startswith("never run")
    assert all(row["install"] for row in rows.values() if not row["installed"])
    assert rows["llamacpp"]["capabilities"]["batching"]["support"] == "no"


def test_an_environment_may_be_named(tmp_path: Path) -> None:
    site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "sglang-0.5.23.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    (tmp_path / "venv" / "bin").mkdir()
    (tmp_path / "venv" / "bin" / "python").write_text("")
    for words, env in (
        (["--venv", f"sglang={tmp_path / 'venv'}"], {}),
        ([], {"INFERLOOP_VENVS": f"sglang={tmp_path / 'venv'}"}),
    ):
        result = RUNNER.invoke(app, ["backends", "sglang", "--json", *words], env=env)
        row = json.loads(result.stdout)["backends"][0]
        assert (row["installed"], row["version"], row["where"]) == (True, "0.5.23", str(tmp_path / "venv"))


def test_people_see_tables() -> None:
    result = RUNNER.invoke(app, ["backends"])
    assert result.exit_code == 0 and "not here: pip install sglang" in result.stdout
    one = RUNNER.invoke(app, ["backends", "llamacpp"])
    assert one.exit_code == 0 and "answered one after the other" in one.stdout


def test_an_unknown_one_is_told() -> None:
    result = RUNNER.invoke(app, ["backends", "vlm", "--json"])
    assert result.exit_code == 2
    assert "did you mean 'vllm'" in json.loads(result.stdout)["error"]["message"]

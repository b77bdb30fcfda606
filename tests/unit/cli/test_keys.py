"""Where the API keys of a server come from, and what is said when there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from inferloop.cli import serve_run
from inferloop.cli.keys import server_keys, warn_of_open_door
from inferloop.cli.main import app
from inferloop.cli.serve_run import Asked
from inferloop.core.errors import UsageError
from inferloop.core.secret import Secret

HUSH = "sk-hush-3f0a"


@pytest.fixture(autouse=True)
def no_keys_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFERLOOP_API_KEY", raising=False)


def test_a_file_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert server_keys(None) == ()
    monkeypatch.setenv("INFERLOOP_API_KEY", "sk-1,sk-2")
    assert server_keys(None) == (Secret("sk-1"), Secret("sk-2"))
    file = tmp_path / "keys"
    file.write_text("sk-3\n")
    assert server_keys(file) == (Secret("sk-3"),)


def test_a_variable_that_was_meant_to_hold_a_key_opens_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", " \n"):
        monkeypatch.setenv("INFERLOOP_API_KEY", text)
        with pytest.raises(UsageError, match="set and empty"):
            server_keys(None)


def test_keys_arrive_at_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Asked] = []
    monkeypatch.setattr(serve_run, "run", seen.append)
    file = tmp_path / "keys"
    file.write_text(HUSH)
    for flags in ([], ["--api-key-file", str(file)]):
        assert CliRunner().invoke(app, ["serve", "m", *flags]).exit_code == 0
    without, with_keys = (asked.config.keys for asked in seen)
    assert without is None and with_keys is not None
    authorization = [(b"authorization", f"Bearer {HUSH}".encode())]
    assert with_keys.refusal("POST", "/v1/completions", authorization) is None


@pytest.mark.parametrize("words", [["--api-key", HUSH], [f"--api-key={HUSH}"]])
@pytest.mark.parametrize("command", [["serve", "m"], ["up", "c.yaml"]])
def test_a_key_on_the_command_line_is_told_where_it_belongs(command: list[str], words: list[str]) -> None:
    told = CliRunner().invoke(app, [*command, *words])
    assert told.exit_code == 2 and HUSH not in told.output
    output = " ".join(told.output.split())
    assert "INFERLOOP_API_KEY" in output and "--api-key-file" in output


@pytest.mark.parametrize(
    ("host", "warns"),
    [("127.0.0.1", 0), ("127.0.0.2", 0), ("::1", 0), ("localhost", 0), ("0.0.0.0", 1), ("::", 1), ("10.0.0.7", 1)],
)
def test_a_door_open_to_others_is_one_line(host: str, warns: int, capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_open_door(host, 8000)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == warns and all("no API key" in line for line in told)
    assert host != "::" or "[::]:8000" in told[0]

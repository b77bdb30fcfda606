"""The command line as a whole: every verb's help, --json also when the command line is wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from typer.testing import CliRunner

from inferloop.cli import main


def verbs() -> list[tuple[str, ...]]:
    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, (*path, name))
        if not hasattr(command, "commands"):
            yield path

    return [path for name in main.VERBS for path in walk(main.verb_command(name), (name,))]


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_help_fits_80_columns_shows_an_example_and_takes_json(
    verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = CliRunner().invoke(main.app, [*verb, "--help"]).stdout
    assert max(map(len, told.splitlines())) <= 80
    assert f"Example: inferloop {' '.join(verb)} " in " ".join(told.split())
    assert "--json" in told
    assert "…" not in told, "an option that is cut cannot be typed"
    assert not re.search("[\u2500-\u257f]", told), "boxes do not belong in a pipe"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "--json"], "Missing argument"),
        (["bench", "c.yaml", "--json", "--bogus"], "No such option"),
        (["up", "--json", "c.yaml", "--port", "99999"], "65535"),
        (["bench", "c.yaml", "--json", "--budget-s", "inf"], "86400"),
        (["bench", "c.yaml", "--json", "--budget-s", "nan"], "--budget-s"),
        (["up", "c.yaml", "--json", "--bench-budget-s", "inf"], "86400"),
        (["serve", "m", "--json", "--drain-timeout-s", "inf"], "86400"),
        (["eval", "s.yaml", "--json", "--target", "http://x", "--timeout-s", "inf"], "86400"),
    ],
)
def test_a_wrong_command_line_is_an_object_too(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inferloop", *words])
    with pytest.raises(SystemExit) as left:
        main.run()
    told = capsys.readouterr()
    assert left.value.code == 2
    assert says in json.loads(told.out)["error"]["message"]
    assert says in told.err and "Usage:" in told.err and "Traceback" not in told.err


def test_the_version_is_told() -> None:
    told = CliRunner().invoke(main.app, ["--version"])
    assert (told.exit_code, told.stdout) == (0, f"inferloop {version('inferloop')}\n")


def test_a_wrong_command_line_leaves_stdout_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inferloop", "chek"])
    with pytest.raises(SystemExit) as left:
        main.run()
    told = capsys.readouterr()
    assert (left.value.code, told.out) == (2, "")
    assert "chek" in told.err


def test_the_code_of_a_verb_is_the_code_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inferloop", "check", "/no/such/file.yaml", "--json"])
    with pytest.raises(SystemExit) as left:
        main.run()
    assert left.value.code == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UsageError"

"""Errors to exit codes, results to JSON, signals to an orderly end."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
import typer
from typer.testing import CliRunner

from inferloop.cli.common import EXIT_INTERRUPTED, JsonOption, print_json, run_async, verb
from inferloop.core.errors import ContractError, ModelFileError, RunVoidError

ERRORS = {
    "contract": ContractError("unknown key", file="a.yaml", line=3, key="slo.tftt_ms", hint="did you mean ttft_ms?"),
    "model": ModelFileError("model.gguf: truncated"),
    "void": RunVoidError("the client was late"),
}
app = typer.Typer()


@app.command()
@verb
def fail(kind: str, json_output: JsonOption = False) -> None:
    raise ERRORS[kind]


@app.command()
@verb
def interrupt(json_output: JsonOption = False) -> None:
    raise KeyboardInterrupt


@app.command()
@verb
def crash(json_output: JsonOption = False) -> None:
    raise ZeroDivisionError("ours")


@pytest.mark.parametrize(("kind", "code"), [("contract", 2), ("model", 3), ("void", 4)])
def test_a_typed_error_is_one_line_and_its_exit_code(kind: str, code: int) -> None:
    result = CliRunner().invoke(app, ["fail", kind])
    assert result.exit_code == code
    assert str(ERRORS[kind]) in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_json_output_stays_json_when_the_verb_fails() -> None:
    result = CliRunner().invoke(app, ["fail", "contract", "--json"])
    assert json.loads(result.stdout)["error"]["type"] == "ContractError"


def test_markup_in_a_message_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    ERRORS["markup"] = ModelFileError("no file [red]x[/red] here")
    result = CliRunner().invoke(app, ["fail", "markup"])
    assert "[red]x[/red]" in result.stderr


def test_our_own_fault_is_an_object_and_keeps_its_traceback() -> None:
    result = CliRunner().invoke(app, ["crash", "--json"])
    assert json.loads(result.stdout)["error"] == {"type": "ZeroDivisionError", "message": "ours"}
    assert isinstance(result.exception, ZeroDivisionError)


def test_an_interrupt_is_an_object_too() -> None:
    result = CliRunner().invoke(app, ["interrupt", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["error"]["type"]) == (EXIT_INTERRUPTED, "Interrupted")


def test_an_interrupt_exits_with_130() -> None:
    assert CliRunner().invoke(app, ["interrupt"]).exit_code == EXIT_INTERRUPTED


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_and_lets_the_clean_up_finish(signum: signal.Signals) -> None:
    steps = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signum)
        try:
            await asyncio.sleep(30)
        finally:
            os.kill(os.getpid(), signum)  # an impatient second one
            await asyncio.sleep(0.02)
            steps.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        run_async(main)
    assert steps == ["cleaned up"]


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        print_json({"x": float("nan")})
    print_json({"x": (1, 2)})
    assert capsys.readouterr().out == '{"x": [1, 2]}\n'

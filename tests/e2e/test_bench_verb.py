"""The verb as a process: its JSON, its exit codes, its run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from inferloop.records.run import open_run

CONTRACT = {
    "version": 1,
    "service": "tiny",
    "archetype": "chat",
    "model": {"id": "demo"},
    "traffic": {
        "qps": {"avg": 30, "p95": 50, "peak": 60},
        "input_tokens": {"p50": 50, "p95": 80},
        "output_tokens": {"p50": 3, "p95": 5},
        "prefix_reuse": 0,
    },
    "slo": {"ttft_ms": {"p95": 2000}},
}


def command(tmp_path: Path, contract: dict[str, Any], *more: str) -> list[str]:
    file = tmp_path / "contract.json"
    file.write_text(json.dumps(contract))
    where = ("--runs-dir", str(tmp_path / "runs"))
    return [sys.executable, "-m", "inferloop", "bench", str(file), "--target", "scripted", *where, *more]


def test_a_pass_prints_one_object_and_leaves_a_report(tmp_path: Path) -> None:
    words = command(tmp_path, CONTRACT, "--json", "--points", "1", "--budget-s", "20")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["verdict"] == "pass"
    modes = [point["mode"] for point in summary["points"]]
    assert modes[:2] == ["serial", "burst"]
    assert set(modes[2:]) == {"open"}
    for name in ("mean", "p50", "p95", "p99"):
        assert name in summary["points"][-1]["ttft_ms"]
    assert summary["capacity"]["low"] >= 60
    assert summary["replicas"]["needed"] >= 2
    assert summary["replicas"]["rho"] == 0.7
    folder = Path(summary["run"])
    assert (folder / "report.html").stat().st_size > 10_000
    assert open_run(folder).complete


def test_a_missed_objective_exits_1(tmp_path: Path) -> None:
    contract = {**CONTRACT, "slo": {"ttft_ms": {"p95": 5}}}
    done = subprocess.run(command(tmp_path, contract), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "does not fit" in done.stdout
    assert "fail" in done.stdout


def test_ctrl_c_leaves_a_readable_run_and_exits_130(tmp_path: Path) -> None:
    child = subprocess.Popen(
        command(tmp_path, CONTRACT), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "runs").glob("*/requests.jsonl")):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    (folder,) = (tmp_path / "runs").iterdir()
    record = open_run(folder)
    assert (record.status, record.complete) == ("interrupted", False)
    assert record.rows


def test_an_unknown_target_is_named(tmp_path: Path) -> None:
    words = [word if word != "scripted" else "scriptd" for word in command(tmp_path, CONTRACT)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "did you mean 'scripted'" in done.stderr

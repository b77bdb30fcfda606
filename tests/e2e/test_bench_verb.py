"""The verb as a process: its JSON, its exit codes, its run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S, wait_until

from inferloop.contract.load import parse
from inferloop.measure.verdict import judge
from inferloop.records.run import open_run

OnlyBusy = Callable[[Sequence[str]], bool]


def command(contract_file: Path, *more: str, seed: int | None = 0) -> list[str]:
    where = ["--target", "scripted", "--runs-dir", str(contract_file.with_name("runs"))]
    seeded = [] if seed is None else ["--seed", str(seed)]
    return [sys.executable, "-m", "inferloop", "bench", str(contract_file), *where, *seeded, *more]


def test_one_object_says_what_was_recorded_and_the_exit_code_follows_it(
    contract_file: Path, contract: dict[str, Any], only_busy: OnlyBusy
) -> None:
    words = command(contract_file, "--json", "--points", "1", "--budget-s", "20")
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    summary = json.loads(done.stdout)
    folder = Path(summary["run"])
    record = open_run(folder)
    assert record.complete or summary["verdict"] == "void"
    modes = [point["mode"] for point in summary["points"]]
    assert modes[:1] == ["serial"]
    assert set(modes[2:]) <= {"open"}
    measured = record.points()
    for point in summary["points"]:
        assert point["num_requests"] == len(measured[point["name"]])
        assert set(point["ttft_ms"]) >= {"mean", "p50", "p95", "p99"}
    assert summary["replicas"]["rho"] == 0.7
    assert (summary["seed"], record.header.seed) == (0, 0)
    assert (folder / "report.html").stat().st_size > 10_000
    if summary["verdict"] == "void":
        assert only_busy(summary["reasons"])
    else:
        assert modes[1] == "burst"
        again = judge(parse(contract).slo, measured[summary["judged_point"]]).verdict
        assert summary["verdict"] == again
    if summary["verdict"] == "pass":
        assert summary["capacity"]["low"] > 0 and summary["replicas"]["needed"] >= 2
    assert done.returncode == {"pass": 0, "void": 4}.get(summary["verdict"], 1), done.stderr


def test_the_seed_is_told_and_gives_the_same_requests_again(contract_file: Path) -> None:
    """Two runs of a random seed, of which the second is asked for what the first one had; and a third of another."""

    def run(seed: int | None) -> tuple[dict[str, Any], list[tuple[int, ...]], str]:
        words = command(contract_file, "--json", "--points", "0", "--budget-s", "5", "--peak", "0", seed=seed)
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        summary = json.loads(done.stdout)
        rows = [row for row in open_run(Path(summary["run"])).rows if row.point == "warmup"]
        return summary, [(t.num_input_tokens, t.num_output_tokens) for t in (r.timing for r in rows)], done.stderr

    first, sent, told = run(None)
    assert f"seed {first['seed']}" in told
    again, repeated, _ = run(first["seed"])
    assert (again["seed"], repeated) == (first["seed"], sent)
    other, others, _ = run(None)
    assert other["seed"] != first["seed"] and len(others) == len(sent)


def test_a_missed_objective_exits_1(contract_file: Path, contract: dict[str, Any], only_busy: OnlyBusy) -> None:
    contract_file.write_text(json.dumps({**contract, "slo": {"ttft_ms": {"p95": 5}}}))
    done = subprocess.run(command(contract_file), capture_output=True, text=True, timeout=300)
    (folder,) = contract_file.with_name("runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    if summary["verdict"] == "void":
        assert done.returncode == 4 and only_busy(summary["reasons"])
        return
    assert done.returncode == 1, done.stderr
    assert "does not fit" in done.stdout
    assert "fail" in done.stdout


def test_ctrl_c_leaves_a_readable_run_and_exits_130(tmp_path: Path, contract_file: Path) -> None:
    child = subprocess.Popen(
        command(contract_file), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )

    def has_rows() -> bool:
        return any(path.stat().st_size for path in (tmp_path / "runs").glob("*/requests.jsonl"))

    wait_until(lambda: has_rows() or child.poll() is not None)
    assert child.poll() is None
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to all that belongs to the command
    _, stderr = child.communicate(timeout=2 * PATIENCE_S)
    assert child.returncode == 130 and b"Traceback" not in stderr, stderr
    (folder,) = (tmp_path / "runs").iterdir()
    record = open_run(folder)
    assert (record.status, record.complete) == ("interrupted", False)
    assert record.rows
    told = stderr.decode()
    assert f"{folder} has the requests that ended by then (warmup" in told and "no verdict" in told
    assert f"`inferloop report {folder}` shows them" in told


def test_an_unknown_target_is_named(contract_file: Path) -> None:
    words = [word if word != "scripted" else "scriptd" for word in command(contract_file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "did you mean 'scripted'" in done.stderr

"""The main job on the real model: from a contract to a proven service, and what is left when it is interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
from tests.waiting import PATIENCE_S, wait_until

from inferloop.models.resolve import ModelFiles
from inferloop.records.run import open_run

OnlyBusy = Callable[[Sequence[str]], bool]
BRIEFLY = ("--seed", "1", "--bench-budget-s", "30", "--threads", "1", "--rho", "0.95", "--failure-headroom", "0")
"""However slow the machine, in the least time that it takes enough requests come to certify p50, and two replicas that
do no more than the peak carry it."""
KEY = "sk-first-4f1d88e2b7"
CONTRACT = """
version: 1
service: smoke
archetype: chat
model: {id: smollm2-135m-instruct}
traffic:
  qps: {avg: 2, p95: 5, peak: 10}
  input_tokens: 30
  output_tokens: 4
  prefix_reuse: 0
slo: {ttft_ms: {p50: 20000}, ttlt_ms: {p50: 40000}, error_rate: 0.05}
quality: {suite: evals/smoke.yaml, minimum: 1.0}
"""
SUITE = """
suite: smoke
version: 1
cases:
  - id: answers
    kind: regex
    messages: [{role: user, content: "What is the capital of Germany?"}]
    sampling: {max_tokens: 12}
    expect: Berlin
    why: a service that cannot say this is not this model
"""


@pytest.fixture
def workspace(tmp_path: Path, embedded_model: ModelFiles) -> Path:
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "smoke.yaml").write_text(SUITE)
    (tmp_path / "smoke.yaml").write_text(CONTRACT)
    return tmp_path


def command(workspace: Path, *more: str) -> list[str]:
    where = ["--runs-dir", str(workspace / "runs")]
    return [sys.executable, "-m", "inferloop", "up", str(workspace / "smoke.yaml"), *where, *more]


def the_run(workspace: Path) -> Path:
    (folder,) = (workspace / "runs").iterdir()
    return folder


@pytest.fixture
def nothing_left_behind(workspace: Path) -> Iterator[None]:
    """No process of the command outlives it: all of them carry the run folder in their arguments."""
    yield
    wait_until(lambda: not [line for line in _command_lines() if str(workspace) in line])


def _command_lines() -> Iterator[str]:
    for process in psutil.process_iter(["cmdline"]):
        yield " ".join(process.info["cmdline"] or [])


@pytest.mark.usefixtures("nothing_left_behind")
def test_once_does_everything_and_exits_by_the_verdict(workspace: Path, only_busy: OnlyBusy) -> None:
    """With an API key, so that everything it does for itself has to have one."""
    done = subprocess.run(
        command(workspace, "--once", "--json", *BRIEFLY),
        env=os.environ | {"INFERLOOP_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=600,
    )
    summary: dict[str, Any] = json.loads(done.stdout)
    if summary["verdict"] == "void":
        assert done.returncode == 4 and only_busy(_void(summary))
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary["verdict"] == "pass"
    assert {gate["name"]: gate["verdict"] for gate in summary["gates"]} == {
        "memory": "pass",
        "protocol": "pass",
        "quality": "pass",
        "objectives": "pass",
        "fleet": "pass",
        "cost": "not declared",
        "service": "pass",
    }
    modes = [point["mode"] for point in summary["points"]]
    assert modes[0] == "serial" and "burst" in modes and modes[-1] == "open"
    assert summary["replicas"]["started"] >= 1
    assert summary["capacity"]["qps"] > 0
    record = open_run(the_run(workspace))
    assert record.status == "complete" and record.header.verdict == "pass"
    assert record.header.identity is not None and len(record.header.identity["digest"]) == 64
    assert len(record.timings) == sum(point["num_requests"] for point in summary["points"])
    report = (record.path / "report.html").read_text()
    assert "smoke" in report and record.header.identity["digest"][:12] in report
    rows = [json.loads(line) for line in _lines(record.path / "events", "replica-*.jsonl")]
    rows += [json.loads(line) for line in _lines(record.path / "events", "gateway.jsonl")]
    assert {row["identity_digest"] for row in rows} == {record.header.identity["digest"]}
    assert {row["service"] for row in rows} == {"smoke"}
    assert "France" not in "".join(_lines(record.path / "events", "*.jsonl")), "events hold no text"
    assert KEY not in done.stdout + done.stderr
    assert not [path for path in record.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def _void(summary: dict[str, Any]) -> list[str]:
    return [gate["reason"] for gate in summary["gates"] if gate["verdict"] == "void"]


def _lines(folder: Path, pattern: str) -> list[str]:
    return [line for path in folder.glob(pattern) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("stage", ["replica", "protocol", "quality", "serial", "fleet"])
def test_an_interrupt_leaves_a_readable_run_and_no_process(workspace: Path, stage: str) -> None:
    process = subprocess.Popen(
        command(workspace, "--once", "--bench-budget-s", "20"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_held(workspace, {"replica": "measured", "fleet": "r0"}.get(stage)),
    )
    try:
        _wait_for_stage(workspace, stage, process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=2 * PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130, output.decode()
    assert b"Traceback" not in output
    record = open_run(the_run(workspace))
    assert record.status == "interrupted"
    assert any(event.stage == stage for event in record.stages)
    assert not list(record.path.glob("*.tmp*"))
    assert stage == "replica" or record.header.identity, "who answered is known before the first answer is judged"


def _held(workspace: Path, replica: str | None) -> dict[str, str]:
    """An environment in which this replica never gets ready: its stage, which may be short, lasts."""
    (workspace / "sitecustomize.py").write_text(
        f"import sys, time\nif {str(replica)!r} in sys.orig_argv:\n    time.sleep(600)\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(workspace), os.environ.get("PYTHONPATH", "")])}


def _wait_for_stage(workspace: Path, stage: str, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for path in (workspace / "runs").glob("*/stages.jsonl"):
            if f'"stage": "{stage}"' in path.read_text():
                return
        assert process.poll() is None, f"ended before stage {stage}"
        time.sleep(0.02)
    raise AssertionError(f"stage {stage} never began")


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_service_runs_until_it_is_told_to_stop(workspace: Path, only_busy: OnlyBusy) -> None:
    """With an API key, which opens its gateway and nothing behind it."""
    told = workspace / "stderr"
    with told.open("w") as stderr:
        process = subprocess.Popen(
            command(workspace, *BRIEFLY),
            env=os.environ | {"INFERLOOP_API_KEY": KEY},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        serving = re.compile(r"serving on (http://[0-9.:]+)")
        deadline = time.monotonic() + 600
        while not serving.search(told.read_text()) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        folder = the_run(workspace)
        if process.poll() == 4:
            assert only_busy(_void(json.loads((folder / "summary.json").read_text())))
            return
        (url,) = serving.findall(told.read_text())
        assert (folder / "report.html").exists()
        answer = _chat(url, KEY)
        assert "Berlin" in answer["choices"][0]["message"]["content"]
        with pytest.raises(HTTPError, match="401"):
            _chat(url, "none")
        behind = [p for p in psutil.Process(process.pid).children(recursive=True) if "serve" in p.cmdline()]
        ports = {at.laddr.port for p in behind for at in p.net_connections() if at.status == psutil.CONN_LISTEN}
        assert ports
        for replica_port in ports:
            with pytest.raises(HTTPError, match="401"):
                _chat(f"http://127.0.0.1:{replica_port}", KEY)
        process.send_signal(signal.SIGTERM)
        code = process.wait(2 * PATIENCE_S)
    finally:
        process.kill()
    assert "Traceback" not in told.read_text()
    record = open_run(folder)  # whether ten seconds certify the peak depends on the machine
    assert record.complete and code == {"pass": 0, "void": 4}.get(str(record.header.verdict), 1), told.read_text()


def _chat(url: str, key: str) -> Any:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "What is the capital of Germany?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=2 * PATIENCE_S) as answer:
        return json.load(answer)


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_taken_port_is_said_before_any_work(workspace: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(command(workspace, "--once", "--port", port), capture_output=True, text=True, timeout=300)
    assert done.returncode == 3
    assert f"127.0.0.1:{port}" in done.stderr and "in use" in done.stderr
    assert not (workspace / "runs").exists()


def test_a_typo_in_the_contract_is_named_with_file_line_and_key(workspace: Path) -> None:
    path = workspace / "smoke.yaml"
    path.write_text(CONTRACT.replace("ttft_ms", "ttft_m"))
    done = subprocess.run(command(workspace, "--once"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert f"{path}:11: slo.ttft_m: is not a known key (did you mean ttft_ms?)" in done.stderr


def test_a_precision_that_the_engine_cannot_run_is_refused_before_any_work(workspace: Path) -> None:
    path = workspace / "smoke.yaml"
    path.write_text(CONTRACT.replace("{id: smollm2-135m-instruct}", "{id: smollm2-135m-instruct, precision: q4_k}"))
    done = subprocess.run(command(workspace, "--once"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "q4_k" in done.stderr and "bf16" in done.stderr
    assert not (workspace / "runs").exists()


def test_a_missing_model_file_is_named(workspace: Path) -> None:
    path = workspace / "smoke.yaml"
    path.write_text(CONTRACT.replace("smollm2-135m-instruct", "./nowhere.gguf"))
    done = subprocess.run(command(workspace, "--once"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 3
    assert "nowhere.gguf" in done.stderr and "Traceback" not in done.stderr

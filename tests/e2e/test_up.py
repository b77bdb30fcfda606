"""The main job on the real model: from a contract to a proven service, and what is left when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest

from inferloop.models.resolve import ModelFiles
from inferloop.records.run import open_run

KEY = "sk-first-4f1d88e2b7"
CONTRACT = """
version: 1
service: smoke
archetype: chat
model: {id: smollm2-135m-instruct}
traffic:
  qps: {avg: 1, p95: 2, peak: 5}
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
    deadline = time.monotonic() + 10
    while left := [line for line in _command_lines() if str(workspace) in line]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)


def _command_lines() -> Iterator[str]:
    for process in psutil.process_iter(["cmdline"]):
        yield " ".join(process.info["cmdline"] or [])


@pytest.mark.usefixtures("nothing_left_behind")
def test_once_does_everything_and_exits_by_the_verdict(workspace: Path) -> None:
    """With an API key, so that everything it does for itself has to have one."""
    done = subprocess.run(
        command(workspace, "--once", "--json", "--bench-budget-s", "40"),
        env=os.environ | {"INFERLOOP_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
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
    assert summary["capacity"]["qps"] >= 5
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


def _lines(folder: Path, pattern: str) -> list[str]:
    return [line for path in folder.glob(pattern) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("stage", ["replica", "protocol", "quality", "serial", "fleet"])
def test_an_interrupt_leaves_a_readable_run_and_no_process(workspace: Path, stage: str) -> None:
    process = subprocess.Popen(
        command(workspace, "--once", "--bench-budget-s", "20"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        _wait_for_stage(workspace, stage, process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output.decode()
    assert b"Traceback" not in output
    record = open_run(the_run(workspace))
    assert record.status == "interrupted"
    assert any(event.stage == stage for event in record.stages)
    assert not list(record.path.glob("*.tmp*"))
    assert stage == "replica" or record.header.identity, "who answered is known before the first answer is judged"


def _wait_for_stage(workspace: Path, stage: str, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for path in (workspace / "runs").glob("*/stages.jsonl"):
            if f'"stage": "{stage}"' in path.read_text():
                return
        if process.poll() is not None:
            raise AssertionError(f"ended before stage {stage}: {process.communicate()[0]!r}")
        time.sleep(0.02)
    raise AssertionError(f"stage {stage} never began")


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_service_runs_until_it_is_told_to_stop(workspace: Path) -> None:
    """With an API key, which opens its gateway and nothing behind it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    process = subprocess.Popen(
        command(workspace, "--port", str(port), "--bench-budget-s", "20"),
        env=os.environ | {"INFERLOOP_API_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for_stage(workspace, "proof", process)
        folder = the_run(workspace)
        deadline = time.monotonic() + 60
        while not (folder / "report.html").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        answer = _chat(port, KEY)
        assert "Berlin" in answer["choices"][0]["message"]["content"]
        with pytest.raises(HTTPError, match="401"):
            _chat(port, "none")
        behind = [p for p in psutil.Process(process.pid).children(recursive=True) if "serve" in p.cmdline()]
        ports = {at.laddr.port for p in behind for at in p.net_connections() if at.status == psutil.CONN_LISTEN}
        assert ports
        for replica_port in ports:
            with pytest.raises(HTTPError, match="401"):
                _chat(replica_port, KEY)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "Traceback" not in errors
    assert process.returncode in (0, 1), errors  # by the verdict: ten seconds may not certify the peak
    assert open_run(folder).complete


def _chat(port: int, key: str) -> Any:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "What is the capital of Germany?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_taken_port_is_said_before_any_work(workspace: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(command(workspace, "--once", "--port", port), capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert f"127.0.0.1:{port}" in done.stderr and "in use" in done.stderr
    assert not (workspace / "runs").exists()


def test_a_typo_in_the_contract_is_named_with_file_line_and_key(workspace: Path) -> None:
    path = workspace / "smoke.yaml"
    path.write_text(CONTRACT.replace("ttft_ms", "ttft_m"))
    done = subprocess.run(command(workspace, "--once"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{path}:11: slo.ttft_m: is not a known key (did you mean ttft_ms?)" in done.stderr


def test_a_precision_that_the_engine_cannot_run_is_refused_before_any_work(workspace: Path) -> None:
    path = workspace / "smoke.yaml"
    path.write_text(CONTRACT.replace("{id: smollm2-135m-instruct}", "{id: smollm2-135m-instruct, precision: q4_k}"))
    done = subprocess.run(command(workspace, "--once"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "q4_k" in done.stderr and "bf16" in done.stderr
    assert not (workspace / "runs").exists()


def test_a_missing_model_file_is_named(workspace: Path) -> None:
    path = workspace / "smoke.yaml"
    path.write_text(CONTRACT.replace("smollm2-135m-instruct", "./nowhere.gguf"))
    done = subprocess.run(command(workspace, "--once"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "nowhere.gguf" in done.stderr and "Traceback" not in done.stderr

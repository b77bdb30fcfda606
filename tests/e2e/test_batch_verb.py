"""`inferloop batch`: exit codes, going on after an interrupt, trying failed rows again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from tests.waiting import PATIENCE_S, wait_until

from inferloop.models.resolve import ModelFiles

BATCH = [sys.executable, "-m", "inferloop", "batch"]
SLOW = """
from inferloop.backends import serve_process
launch_spec = serve_process.launch_spec
serve_process.launch_spec = lambda model, options, **more: launch_spec(model, {**options, "script": SCRIPT}, **more)
from inferloop.__main__ import main
main()
"""
"""The command with a script that takes minutes for a row of more than one token."""
NUM_SHORT, NUM_LONG, LONG = 20, 40, 150


def write(path: Path, *bodies: dict[str, Any]) -> Path:
    path.write_text(
        "\n".join(
            json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body})
            for i, body in enumerate(bodies)
        )
    )
    return path


def run(file: Path, output: Path, target: str = "scripted", *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*BATCH, str(file), "--target", target, "--output", str(output), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def some_short(tmp_path: Path) -> Path:
    lengths = [1] * NUM_SHORT + [LONG] * NUM_LONG
    bodies = [{"prompt": str(i), "max_tokens": num, "ignore_eos": True} for i, num in enumerate(lengths)]
    return write(tmp_path / "in.jsonl", *bodies)


@contextmanager
def half_done(file: Path, output: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A run that has answered the short rows, and will not soon have answered another one; and the server that it has
    launched."""
    program = SLOW.replace("SCRIPT", repr(["tpot_ms=60000"]))
    words = ["batch", str(file), "--target", "scripted", "--output", str(output)]
    with subprocess.Popen([sys.executable, "-c", program, *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: (server := server_of(process)) is not None and num_answered(server) == NUM_SHORT)
            server = server_of(process)
            assert server is not None
            yield process, server
        finally:
            process.kill()


def server_of(process: subprocess.Popen[str]) -> psutil.Process | None:
    found = [p for p in psutil.Process(process.pid).children(recursive=True) if p.cmdline()[3:4] == ["serve"]]
    return found[0] if found else None


def num_answered(server: psutil.Process) -> int:
    words = server.cmdline()
    url = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    try:
        with urllib.request.urlopen(f"{url}/v1/batches", timeout=PATIENCE_S) as answer:
            batches = json.load(answer)["data"]
    except OSError:
        return 0
    return sum(batch["request_counts"]["completed"] for batch in batches)


def test_failed_rows_are_told_apart_and_only_they_are_tried_again(tmp_path: Path) -> None:
    good: dict[str, Any] = {"prompt": "x", "max_tokens": 3}
    file, output = write(tmp_path / "in.jsonl", good, {**good, "max_tokens": 10**6}, good), tmp_path / "out.jsonl"
    first = run(file, output, "scripted", "--json")
    summary = json.loads(first.stdout)
    assert first.returncode == 1, first.stderr
    assert (summary["rows"], summary["completed"], summary["failed"], summary["kept"]) == (3, 2, 1, 0)
    assert ids(output) == ["c0", "c2"] and ids(tmp_path / "out.errors.jsonl") == ["c1"]
    kept = output.read_text().splitlines()
    again = run(write(file, good, good, good), output, "scripted", "--json")
    summary = json.loads(again.stdout)
    assert again.returncode == 0, again.stderr
    assert (summary["completed"], summary["failed"], summary["kept"], summary["output_tokens"]) == (3, 0, 2, 3)
    lines = output.read_text().splitlines()
    assert [lines[0], lines[2]] == kept and ids(output) == ["c0", "c1", "c2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_wrong_file_is_told_line_by_line_and_nothing_runs(tmp_path: Path) -> None:
    good: dict[str, Any] = {"prompt": "x"}
    file = write(tmp_path / "in.jsonl", good, {"prompt": ""}, {**good, "model": "other"}, {**good, "top_p": 7})
    done = run(file, tmp_path / "out.jsonl", "scripted", "--model", "m")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert [line for line in (2, 3, 4) if f"{file}:{line}: " in done.stderr] == [2, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    file, output = some_short(tmp_path), tmp_path / "out.jsonl"
    with half_done(file, output) as (process, _):
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 130
    assert f"to go on: inferloop batch {file} --target scripted --output {output}" in told and not output.exists()
    done = run(file, output, "scripted", "--json")
    summary = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    num_rows = NUM_SHORT + NUM_LONG
    assert (summary["completed"], summary["output_tokens"]) == (num_rows, NUM_SHORT + NUM_LONG * LONG)
    assert ids(output) == [f"c{i}" for i in range(num_rows)]
    assert not (tmp_path / "out.jsonl.batch").exists()


def test_a_server_that_is_killed_costs_no_answer(tmp_path: Path) -> None:
    file, output = some_short(tmp_path), tmp_path / "out.jsonl"
    with half_done(file, output) as (process, server):
        server.kill()
        _, told = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 3 and "Traceback" not in told
    assert f"To go on: inferloop batch {file} --target scripted --output {output}" in told
    assert run(file, output).returncode == 0 and ids(output) == [f"c{i}" for i in range(NUM_SHORT + NUM_LONG)]


def test_an_output_of_other_rows_is_refused(tmp_path: Path) -> None:
    file, output = write(tmp_path / "in.jsonl", {"prompt": "x"}), tmp_path / "out.jsonl"
    output.write_text('{"custom_id":"stranger","response":{}}\n')
    done = run(file, output)
    assert done.returncode == 2 and "stranger" in done.stderr


def test_a_server_without_batch_jobs_says_how(served_model: str, embedded_model: ModelFiles, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", {"prompt": "x"})
    done = run(file, tmp_path / "out.jsonl", served_model, "--model", embedded_model.model_id)
    assert done.returncode == 2 and "--batch-dir" in done.stderr

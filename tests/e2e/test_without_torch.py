"""Torch is needed only where the native extension is missing; without either the fix is named, and the exit is 3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from inferloop.models.resolve import ModelFiles

CONTRACT = """
{model: MODEL, qps: 1, input_tokens: 30, output_tokens: 4, slo: {ttft_p95_ms: 1000}}
"""
EXTENSION = "inferloop.engine.compute.native._native"
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def without(folder: Path, *modules: str) -> dict[str, str]:
    """An environment in which Python, and every Python that it starts, lacks these modules."""
    (folder / "sitecustomize.py").write_text(BLOCKER.format(blocked=modules))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


@pytest.mark.parametrize("verb", ["serve", "up", "bench"])
def test_the_fix_is_named(tmp_path: Path, embedded_model: ModelFiles, verb: str) -> None:
    contract = tmp_path / "c.yaml"
    contract.write_text(CONTRACT.replace("MODEL", str(embedded_model.path)))
    told = {
        "serve": [str(embedded_model.path), "--port", "0"],
        "up": [str(contract), "--once", "--runs-dir", str(tmp_path / "runs")],
        "bench": [str(contract), "--runs-dir", str(tmp_path / "runs")],
    }[verb]
    done = subprocess.run(
        [sys.executable, "-m", "inferloop", verb, *told, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        env=without(tmp_path, "torch", EXTENSION),
    )
    assert done.returncode == 3, done.stderr
    assert "pip install 'inferloop[torch]'" in json.loads(done.stdout)["error"]["message"]
    assert "Traceback" not in done.stderr


def test_the_native_engine_serves_without_torch(tmp_path: Path, embedded_model: ModelFiles) -> None:
    pytest.importorskip(EXTENSION)
    port_file, log = tmp_path / "port.json", tmp_path / "log"
    command = [sys.executable, "-m", "inferloop", "serve", str(embedded_model.path), "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port-file", str(port_file)], stdout=out, stderr=out, env=without(tmp_path, "torch")
        )
    try:
        deadline = time.monotonic() + 120
        while not port_file.exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        url = f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"
        asked = {"model": str(embedded_model.path), "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["choices"][0]["text"].startswith(" four")
        with urllib.request.urlopen(f"{url}/identity", timeout=60) as answer:
            assert "native" in answer.read().decode()
    finally:
        process.terminate()
        assert process.wait(120) == 0, log.read_text()

"""An installation without torch says so, with the fix, and exits with 3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferloop.models.resolve import ModelFiles

CONTRACT = """
{model: MODEL, qps: 1, input_tokens: 30, output_tokens: 4, slo: {ttft_p95_ms: 1000}}
"""


@pytest.mark.parametrize("verb", ["serve", "up", "bench"])
def test_the_fix_is_named(tmp_path: Path, embedded_model: ModelFiles, verb: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    contract = tmp_path / "c.yaml"
    contract.write_text(CONTRACT.replace("MODEL", str(embedded_model.path)))
    told = {
        "serve": [str(embedded_model.path), "--port", "0"],
        "up": [str(contract), "--once", "--runs-dir", str(tmp_path / "runs")],
        "bench": [str(contract), "--runs-dir", str(tmp_path / "runs")],
    }[verb]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "inferloop", verb, *told, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 3, done.stderr
    assert "pip install 'inferloop[torch]'" in json.loads(done.stdout)["error"]["message"]
    assert "Traceback" not in done.stderr

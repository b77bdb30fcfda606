"""`inferloop up` of a contract with two models: both are run, and each is proven by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from inferloop.models.resolve import ModelFiles

CONTRACT = """
version: 1
service: desk
models:
  cheap: {id: smollm2-135m-instruct, precision: int8, usd_per_mtok: 1}
  strong: {id: smollm2-135m-instruct, precision: bf16, usd_per_mtok: 10}
routing:
  default: cheap
  escalation: {from: cheap, to: strong, on: [invalid_json]}
traffic:
  qps: {avg: 2, p95: 5, peak: 10}
  input_tokens: 30
  output_tokens: 4
slo: {ttft_ms: {p50: 20000}, ttlt_ms: {p50: 40000}, error_rate: 0.05}
"""


def test_every_model_of_the_contract_is_run_and_proven(tmp_path: Path, embedded_model: ModelFiles) -> None:
    (tmp_path / "desk.yaml").write_text(CONTRACT)
    command = [sys.executable, "-m", "inferloop", "up", str(tmp_path / "desk.yaml"), "--once", "--json"]
    options = ["--bench-budget-s", "30", "--kv-memory-mib", "128", "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=3000)
    summary: dict[str, Any] = json.loads(done.stdout)
    verdicts = {gate["name"]: gate["verdict"] for gate in summary["gates"]}
    wanted = {"memory": "pass", "protocol": "pass", "service": "pass"}
    assert wanted.items() <= verdicts.items(), f"{summary['reasons']} {done.stderr}"
    assert [chat["problem"] for chat in summary["proof"]["chats"]] == [""] * 6
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "events" / "gateway.jsonl").read_text().splitlines()]
    assert sorted(row["model"] for row in rows) == ["cheap"] * 4 + ["strong"] * 2, "desk, cheap and strong, two each"
    assert all(row["cost_usd"] > 0 and len(row["hops"]) == 1 for row in rows)
    assert (folder / "events" / "replica-strong-r0.jsonl").exists()
    (fleet,) = (gate for gate in summary["gates"] if gate["name"] == "fleet")
    assert "only cheap was measured" in fleet["reason"] and "only cheap was measured" in done.stderr


def test_another_engine_cannot_run_several_models(tmp_path: Path) -> None:
    (tmp_path / "desk.yaml").write_text(CONTRACT)
    command = [sys.executable, "-m", "inferloop", "up", str(tmp_path / "desk.yaml"), "--target", "openvino"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 2 and "several of them run embedded" in done.stderr
    assert not (tmp_path / "runs").exists()

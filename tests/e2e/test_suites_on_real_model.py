"""The shipped suites against the embedded model in a real server: both precisions, cases in flight together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inferloop.backends.serve_process import launch_spec
from inferloop.contract.workload import QualityGate
from inferloop.evals.load import load_suite
from inferloop.evals.run import run_suite
from inferloop.evals.suite import KINDS
from inferloop.fleet.act.process import ReplicaProcess
from inferloop.models.resolve import ModelFiles

SUITES = Path(__file__).resolve().parents[2] / "evals"


@pytest.mark.parametrize("dtype", ["auto", "int8", "bf16", "fp32"])
async def test_the_embedded_model_passes_every_case(embedded_model: ModelFiles, tmp_path: Path, dtype: str) -> None:
    spec = launch_spec(str(embedded_model.path), {"dtype": dtype})
    replica = await ReplicaProcess.start_ready(spec, log_path=tmp_path / "serve.log", timeout_s=180)
    try:
        for name in ("assistant", "agent", "batch"):
            run = await run_suite(load_suite(SUITES / f"{name}.yaml"), replica.url, concurrency=8, timeout_s=300)
            failed = {r.case.id: (r.score.status, r.score.reason) for r in run.results if r.score.value != 1.0}
            assert not failed, f"{name} in {dtype}"
            assert run.summary(QualityGate(name, 1.0))["verdict"] == "pass"
            assert run.identity_digest and re.fullmatch("[0-9a-f]{64}", run.identity_digest)
    finally:
        await replica.stop(5)


def test_the_verb_launches_our_engine_for_a_suite(embedded_model: ModelFiles, tmp_path: Path) -> None:
    words = ["eval", str(SUITES / "batch.yaml"), "--target", "embedded", "--model", str(embedded_model.path), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "inferloop", *words, "--runs-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    assert summary["score"] == 1.0 and summary["cases"]["scored"] == summary["cases"]["total"] > 0


def test_the_suites_are_as_large_and_as_varied_as_promised() -> None:
    sizes = {name: len(load_suite(SUITES / f"{name}.yaml").cases) for name in ("assistant", "agent", "batch")}
    assert sizes["assistant"] >= 24 and sizes["agent"] >= 8 and sizes["batch"] >= 8
    assert {case.kind for case in load_suite(SUITES / "assistant.yaml").cases} >= set(KINDS) - {"contains"}


async def test_a_service_that_is_not_the_model_does_not_pass(tmp_path: Path) -> None:
    """A server with a faultless protocol and other words: the gate must see the difference."""
    spec = launch_spec("demo", backend="scripted")
    replica = await ReplicaProcess.start_ready(spec, log_path=tmp_path / "serve.log", timeout_s=180)
    try:
        for name in ("assistant", "agent", "batch"):
            run = await run_suite(load_suite(SUITES / f"{name}.yaml"), replica.url)
            assert run.summary(QualityGate(name, 0.9))["verdict"] != "pass"
            wrong = {r.case.id for r in run.results if r.score.value != 1.0}
            told = {r.case.id for r in run.results if r.case.kind in ("exact", "json", "regex", "template")}
            assert told <= wrong, "no golden answer is right by chance"
    finally:
        await replica.stop(5)

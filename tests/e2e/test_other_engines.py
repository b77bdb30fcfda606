"""Engines that are installed, over real HTTP with the embedded model: found, started, asked, and gone. Skipped where an
engine is not there, as on a machine without `make peers`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from inferloop.backends.conformance import CHECKS, by_design, run_checks
from inferloop.backends.discover import ENGINES, find
from inferloop.cli import wire
from inferloop.contract.workload import ModelRef

MUST_PASS = {
    "llamacpp": {"models", "chat", "completion", "stream_without_usage", "stop_never_leaks", "max_tokens"},
    "llama-server": {"models", "chat", "completion", "stop_never_leaks", "max_tokens", "logprobs", "metrics"},
    "openvino": {"models", "chat", "completion", "stream_equals_whole", "stop_never_leaks", "max_tokens", "disconnect"},
}


@pytest.mark.parametrize("engine", MUST_PASS)
async def test_checks(engine: str, tmp_path: Path) -> None:
    need(engine)
    checks = [check for check in CHECKS if check.__name__.removeprefix("check_") in MUST_PASS[engine]]
    async with wire.target(
        engine, ModelRef(wire.EMBEDDED_MODEL), log_dir=tmp_path, cache_dir=None, entry=wire.Entry()
    ) as up:
        results = await run_checks(up.at.url, str(up.model), checks=checks, timeout_s=300.0)
    wrong = [r for r in by_design(results, ENGINES[engine].capabilities) if r.outcome != "passed"]
    assert not wrong, wrong
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


def test_an_eval_states_what_was_asked(tmp_path: Path) -> None:
    need("llamacpp")
    words = ["eval", "evals/assistant.yaml", "--target", "llamacpp threads=1", "--json", "--runs-dir", str(tmp_path)]
    words += ["--timeout-s", "300"]
    done = subprocess.run([sys.executable, "-m", "inferloop", *words], capture_output=True, text=True, timeout=900)
    summary = json.loads(done.stdout)
    assert summary["cases"]["errored"] == 0, done.stderr
    header = json.loads((Path(summary["run"]) / "run.json").read_text())
    launched = header["options"]["launched"]
    assert launched["engine"] == "llamacpp" and launched["version"].startswith("llama-cpp-python ")
    assert launched["argv"][launched["argv"].index("--n_threads") + 1] == "1"
    assert header["identity"]["digest"] == summary["identity_digest"]


def need(engine: str) -> None:
    here = find(ENGINES[engine], {})
    if here is None or here.missing:
        pytest.skip(f"{engine} is not installed: {ENGINES[engine].install}")

"""Two scripted targets under the same requests: what differs by construction is found, with its sign."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from inferloop.records.run import open_run

CONTRACT = {
    "version": 1,
    "service": "tiny",
    "archetype": "chat",
    "model": {"id": "demo"},
    "traffic": {
        "qps": {"avg": 20, "p95": 30, "peak": 40},
        "input_tokens": {"p50": 50, "p95": 80},
        "output_tokens": {"p50": 4, "p95": 8},
        "prefix_reuse": 0,
    },
    "slo": {"ttft_ms": {"p95": 2000}},
}


def compare(tmp_path: Path, targets: str, *more: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "contract.json"
    file.write_text(json.dumps(CONTRACT))
    words = [sys.executable, "-m", "inferloop", "compare", str(file), "--targets", targets, "--json"]
    words += ["--runs-dir", str(tmp_path / "runs"), *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=240)


def found(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {d["figure"]: d for d in summary["comparisons"]}


def test_a_slower_target_and_an_equal_one(tmp_path: Path) -> None:
    targets = "scripted ttft_ms=40,scripted ttft_ms=140,scripted ttft_ms=40"
    done = compare(tmp_path, targets, "--rates", "20", "--rounds", "3", "--window-s", "1.5")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    by_target = {label: [d for d in summary["comparisons"] if d["target"] == label] for label in "BC"}
    slower = {d["figure"]: d for d in by_target["B"]}["ttft_ms p50"]
    assert (slower["called"], slower["better"]) == ("more", False)
    assert 60 < slower["difference"] < 140
    assert {d["called"] for d in by_target["C"]} == {"none"}, by_target["C"]
    assert [t["flags"] for t in summary["targets"]] == [["ttft_ms=40"], ["ttft_ms=140"], ["ttft_ms=40"]]
    assert all(t["identity"]["digest"] for t in summary["targets"])
    assert not any("other words" in note for note in summary["notes"]), "one tokenizer: the same bytes for all"
    record = open_run(Path(summary["run"]))
    assert record.complete and record.header.verb == "compare"
    names = list(record.points())
    first = [n for n in names if n.startswith("self")][:4]
    assert first == ["self/A1/20/1", "self/A2/20/1", "self/A2/20/2", "self/A1/20/2"]
    page = (record.path / "report.html").read_text()
    assert "worse" in page and "Noise floor" in page


def test_wrong_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    for targets, said in (
        ("scripted", "at least two"),
        ("scripted,scriptd", "did you mean"),
        ("scripted,http://h:1 a=1", "flags are for"),
    ):
        done = compare(tmp_path, targets)
        assert done.returncode == 2 and said in json.loads(done.stdout)["error"]["message"]
    assert not (tmp_path / "runs").exists()

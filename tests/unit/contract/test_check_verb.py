"""`inferloop check` from the outside: exit codes, one JSON object, evidence from run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from inferloop.cli import main
from inferloop.cli.check import check, evidence_for
from inferloop.contract.load import load
from inferloop.evals.load import load_suite
from inferloop.records.run import RunWriter

SOUND = """\
model: smollm2-135m-instruct-bf16
service: tiny
qps: {avg: 1, p95: 2, peak: 3}
input_tokens: {p50: 40, p95: 100}
output_tokens: {p50: 10, p95: 30}
slo: {ttft_p95_ms: 450, tpot_p95_ms: 40}
"""
SUITE = """\
suite: tiny
version: 1
cases:
  - {id: right, kind: exact, why: it matters, prompt: a, expect: A}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(SOUND)
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(check)
    result = CliRunner().invoke(app, list(arguments))
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_only_commands_that_exist_are_recommended(path: Path) -> None:
    app = typer.Typer()
    app.command()(check)
    app.command("bench")(lambda: None)
    found = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).stdout)
    todo = {step["number"]: step["todo"] for step in found["checklist"]}
    assert todo[4] == f"inferloop bench {path} --target TARGET"
    assert todo[6] == f"inferloop compare {path} --targets A,B"
    assert todo[10] == "not in this version: inferloop optimize"


def test_the_real_command_recommends_what_can_be_pasted(path: Path) -> None:
    (path.parent / "evals").mkdir()
    (path.parent / "evals" / "tiny.yaml").write_text(SUITE)
    path.write_text(SOUND + "quality_gate: tiny\n")
    found = json.loads(CliRunner().invoke(main.app, ["check", str(path), "--json"]).stdout)
    todo = {step["number"]: step["todo"] for step in found["checklist"]}
    assert todo[1] == "inferloop eval evals/tiny.yaml --target TARGET"
    assert todo[5] == "not in this version: inferloop models select"


def test_a_suite_that_cannot_be_read_is_a_bad_contract(path: Path) -> None:
    (path.parent / "evals").mkdir()
    (path.parent / "evals" / "tiny.yaml").write_text(SUITE.replace("exact", "exakt"))
    path.write_text(SOUND + "quality_gate: tiny\n")
    code, found = as_json(str(path))
    assert code == 2 and "did you mean exact" in found["error"]["message"]


@pytest.mark.parametrize(
    ("model", "key", "says"),
    [
        ("./none.gguf", "model.id", "no such file"),
        ("smollm2-135m-instrct", "model.id", "did you mean 'smollm2-135m-instruct'"),
        ("someone/some-model", "model.id", "hub"),
        ("gemma3-270m", "model.id", "inferloop models fetch gemma3-270m --accept-terms"),
        ("smollm2-135m-instruct-fp8", "model.precision", "not in fp8"),
    ],
)
def test_what_cannot_run_here_is_a_warning(path: Path, model: str, key: str, says: str) -> None:
    path.write_text(SOUND.replace("smollm2-135m-instruct-bf16", model))
    code, found = as_json(str(path), "--cache-dir", str(path.parent))
    assert code == 0
    (reason,) = found["reasons"]
    assert reason.startswith(f"{key}: ") and says in reason


def test_a_suite_run_counts_for_its_suite_and_model(path: Path, tmp_path: Path) -> None:
    (path.parent / "evals").mkdir()
    (path.parent / "evals" / "tiny.yaml").write_text(SUITE)
    path.write_text(SOUND + "quality_gate: tiny\n")
    digest = load_suite(path.parent / "evals" / "tiny.yaml").digest
    for suite, model in [("other", "smollm2-135m-instruct"), (digest, "other"), (digest, "smollm2-135m-instruct")]:
        assert as_json(str(path))[1]["checklist"][0]["status"] == "partly"
        with RunWriter(tmp_path / "runs", verb="eval", service="whatever") as writer:
            summary = {"suite": {"digest": suite}, "model": model, "bounds": {"worst": 1.0}}
            writer.finish({"verdict": "not declared", "reasons": [], **summary})
    assert as_json(str(path))[1]["checklist"][0]["status"] == "covered"


def test_a_suite_run_counts_for_the_engine_and_the_precision_that_were_measured(path: Path, tmp_path: Path) -> None:
    (path.parent / "evals").mkdir()
    (path.parent / "evals" / "tiny.yaml").write_text(SUITE)
    path.write_text(SOUND + "quality_gate: tiny\n")
    suite = {"digest": load_suite(path.parent / "evals" / "tiny.yaml").digest}

    def ran(verb: str, target: str, **identity: str) -> str:
        known: dict[str, Any] = {"contract": load(path)} if verb == "bench" else {}
        with RunWriter(tmp_path / "runs", verb=verb, service="tiny", options={"target": target}, **known) as writer:
            writer.update(identity=identity)
            shown = {"points": [{"mode": "serial"}]} if verb == "bench" else {"bounds": {"worst": 1.0}}
            summary = {"suite": suite, "model": "smollm2-135m-instruct", **shown}
            writer.finish({"verdict": "pass", "reasons": [], **summary})
        return str(writer.path)

    def first() -> tuple[str, str]:
        step = as_json(str(path))[1]["checklist"][0]
        return step["status"], step["detail"] + f" -> {step['todo']}"

    ran("eval", "vllm max_num_seqs=8")
    assert first()[0] == "covered" and "was run on vllm: " in first()[1], "nothing else was measured"
    measured = ran("bench", "embedded", engine="inferloop-native", precision="int8")
    assert first()[0] == "partly" and first()[1].endswith("inferloop eval evals/tiny.yaml --target embedded")
    assert "was run on vllm (" in first()[1] and f"not on embedded, which was measured ({measured})" in first()[1]
    ran("eval", "http://127.0.0.1:1", engine="inferloop-native", precision="bf16")
    assert first()[0] == "partly" and "other weights or another precision" in first()[1]
    right = ran("eval", "http://127.0.0.1:1", engine="inferloop-native", precision="int8")
    ran("eval", "http://127.0.0.1:2", engine="vllm")
    assert first() == ("covered", f"evals/tiny.yaml was run on embedded: {right} -> None")


@pytest.mark.parametrize("target", ["scripted", "scripted ttft_ms=5"])
def test_a_played_script_is_no_evidence(path: Path, tmp_path: Path, target: str) -> None:
    loaded = load(path)
    with RunWriter(tmp_path / "runs", verb="bench", service="tiny", contract=loaded) as writer:
        writer.update(options={"target": target})
        writer.finish({"verdict": "pass", "reasons": [], "points": []})
    assert evidence_for(loaded, tmp_path / "runs") == []


def as_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(*arguments, "--json")
    found: dict[str, Any] = json.loads(out)
    return code, found


def test_a_sound_contract(path: Path) -> None:
    code, found = as_json(str(path))
    assert (code, found["verdict"], found["reasons"], found["run"]) == (0, "pass", [], None)
    assert found["digest"] == load(path).digest
    assert found["contract"]["slo"]["ttft_ms"] == {"p95": 450.0}
    assert len(found["checklist"]) == 10


def test_people_see_the_steps(path: Path) -> None:
    code, out, _ = run(str(path))
    assert code == 0
    assert "output tokens/s per user" in out and "Ten steps" in out and "is sound" in out


def test_warnings_fail_only_when_asked(path: Path) -> None:
    path.write_text(SOUND.replace("{avg: 1, p95: 2, peak: 3}", "1"))
    assert run(str(path))[0] == 0
    code, found = as_json(str(path), "--strict")
    assert (code, found["verdict"]) == (1, "fail")
    assert found["reasons"][0].startswith("traffic.qps: peak equals the average")


def test_a_bad_contract_exits_2_and_names_every_line(path: Path) -> None:
    path.write_text(SOUND.replace("peak:", "peek:").replace("450", "-1"))
    code, _, errors = run(str(path))
    assert code == 2
    words = " ".join(errors.split())
    assert "tiny.yaml:3: qps.peek: is not a known key (did you mean peak?)" in words
    assert "tiny.yaml:6: slo.ttft_p95_ms: must be more than 0, not -1" in words


def test_a_missing_file_exits_2(path: Path) -> None:
    code, found = as_json(str(path.with_name("tinny.yaml")))
    assert code == 2
    assert "did you mean" in found["error"]["message"]


def test_evidence_comes_from_finished_runs_of_this_service(path: Path, tmp_path: Path) -> None:
    loaded = load(path)
    runs = tmp_path / "runs"
    summary = {"verdict": "pass", "reasons": [], "points": [{"mode": m} for m in ("serial", "burst", "sweep")]}
    with RunWriter(runs, verb="bench", service="tiny", contract=loaded) as writer:
        writer.finish(summary)
    with RunWriter(runs, verb="bench", service="tiny", contract=loaded):
        pass  # left unfinished
    with RunWriter(runs, verb="bench", service="other", contract=loaded) as writer:
        writer.finish(summary)
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{")
    (evidence,) = evidence_for(loaded, runs)
    assert (evidence.verb, evidence.current) == ("bench", True)
    assert evidence.modes == {"serial", "burst", "sweep"}
    code, found = as_json(str(path))
    assert (code, found["checklist"][3]["status"]) == (0, "covered")
    path.write_text(SOUND.replace("450", "500"))
    assert as_json(str(path))[1]["checklist"][3]["status"] == "open"

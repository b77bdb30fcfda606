"""Lint finds what flatters, the checklist counts only evidence, and the shipped contracts are clean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferloop.contract.archetypes import PROFILES
from inferloop.contract.checklist import Evidence, checklist
from inferloop.contract.lint import lint
from inferloop.contract.load import load, parse
from inferloop.contract.workload import Contract
from inferloop.evals.load import load_suite

CONTRACTS = Path(__file__).resolve().parents[3] / "contracts"


def contract(**changes: Any) -> Contract:
    """A chat service without findings of its own, with some keys replaced."""
    base: dict[str, Any] = {
        "model": "m",
        "qps": {"avg": 2, "p95": 3, "peak": 5},
        "input_tokens": {"p50": 48, "p95": 120},
        "output_tokens": {"p50": 12, "p95": 32},
        "prefix_reuse": 0.3,
        "slo": {"ttft_p95_ms": 1000, "tpot_p95_ms": 100, "error_rate": 0.01},
    }
    return parse(base | changes)


def rules(found: Contract) -> set[str]:
    return {finding.rule for finding in lint(found)}


def test_a_sound_contract_has_only_the_note_on_its_missing_gate() -> None:
    assert rules(contract()) == {"no-quality"}


@pytest.mark.parametrize(
    ("changes", "rule", "severity"),
    [
        ({"qps": 2}, "no-peak", "warning"),
        ({"qps": {"avg": 2, "p95": 3}}, "no-peak", "note"),
        ({"input_tokens": 100}, "constant-length", "warning"),
        ({"input_tokens": {"p50": 100, "p95": 900}}, "independent-lengths", "note"),
        ({"input_tokens": {"p50": 2, "p95": 3}, "prefix_reuse": 0.9}, "reuse-impossible", "warning"),
        ({"slo": {}}, "no-objective", "warning"),
        ({"slo": {"ttft_p50_ms": 1, "tpot_p50_ms": 1}}, "no-tail", "warning"),
        ({"slo": {"ttft_p99_ms": 900, "tpot_p95_ms": 100}}, "slow-to-certify", "note"),
        ({"slo": {"ttft_p95_ms": 900}}, "archetype-objective", "warning"),
        ({"slo": {"ttft_p95_ms": 900}}, "no-error-rate", "note"),
        ({"archetype": "agent"}, "archetype-objective", "warning"),
        ({"archetype": "agent", "prefix_reuse": 0}, "agent-without-reuse", "warning"),
        ({"archetype": "agent"}, "agent-without-loop", "note"),
        ({"model": "tiny-int9"}, "precision-in-name", "note"),
        ({"model": "org/Tiny-FP8"}, "precision-in-name", "note"),
        ({"turns": {"p50": 2, "p95": 3}, "prefix_reuse": 0}, "conversation-without-reuse", "warning"),
        ({"archetype": "batch"}, "archetype-cost", "warning"),
        ({"sla": {"ttft_p95_ms": 900}}, "sla-stricter", "warning"),
        ({"slo": {"ttft_p95_ms": 900, "tpot_p95_ms": 100, "ttlt_p95_ms": 1500}}, "ttlt-binds", "note"),
        ({"privacy": {"capture": "text", "retain_days": 90}}, "long-retention", "note"),
        (
            {"classes": [{"name": "a", "share": 0.5}, {"name": "b", "share": 0.5, "input_tokens": 900}]},
            "mix-differs",
            "warning",
        ),
    ],
)
def test_findings(changes: dict[str, Any], rule: str, severity: str) -> None:
    assert (rule, severity) in {(f.rule, f.severity) for f in lint(contract(**changes))}


def test_p99_says_what_it_takes() -> None:
    slo = {"ttft_p99_ms": 900, "tpot_p95_ms": 100, "error_rate": 0.01}
    message = next(f.message for f in lint(contract(slo=slo)) if f.rule == "slow-to-certify")
    assert message == "p99 takes about 664 requests to certify, 6 min at the average rate"


def test_a_profile_that_rises_above_the_peak_is_told(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("seconds,qps\n0,1\n10,1\n20,7\n30,1\n")
    short = {"model": "m", "input_tokens": 9, "output_tokens": 9, "rate_profile": "p.csv"}
    for peak, rules in ((6.0, ["profile-above-peak"]), (7.0, [])):
        found = lint(parse({**short, "qps": {"avg": 3.0, "peak": peak}}, base=tmp_path))
        assert [f.rule for f in found if f.rule == "profile-above-peak"] == rules


def test_warnings_come_first() -> None:
    severities = [f.severity for f in lint(contract(qps=2, slo={}, archetype="batch"))]
    assert severities == sorted(severities, reverse=True) and "note" in severities


@pytest.mark.parametrize("name", ["assistant", "agent", "batch", "desk", "recorded"])
def test_shipped_contracts_load_without_a_warning(name: str) -> None:
    shipped = load(CONTRACTS / f"{name}.yaml")
    assert shipped.quality is not None and load_suite(Path(shipped.quality.suite)).cases
    assert (shipped.service, shipped.slo.max_error_rate is not None) == (name, True)
    assert [f for f in lint(shipped) if f.severity == "warning"] == []
    assert {o.quantile for o in shipped.slo.objectives} == {0.95}
    assert PROFILES[shipped.archetype].name == shipped.archetype


def status(found: Contract, *evidence: Evidence) -> dict[int, str]:
    return {step.number: step.status for step in checklist(found, evidence)}


def test_the_checklist_has_ten_steps_and_starts_open() -> None:
    steps = checklist(contract())
    assert [s.number for s in steps] == list(range(1, 11))
    assert status(contract())[4] == "open"
    assert status(contract())[2] == "covered"
    assert status(contract(qps=2, input_tokens=3))[2] == "partly"
    assert all(s.todo for s in steps if s.status != "covered")


def bench(*modes: str, **changes: Any) -> Evidence:
    summary = {"run": "runs/a", "verdict": "pass", "points": [{"mode": m} for m in modes]} | changes
    return Evidence.of("bench", summary, current=True)


def test_a_frontier_needs_all_three_modes() -> None:
    assert status(contract(), bench("serial", "burst"))[4] == "partly"
    assert status(contract(), bench("serial", "burst", "sweep"))[4] == "covered"
    assert status(contract(), bench("serial"), bench("burst"), bench("sweep"))[4] == "covered"


def test_a_frontier_is_of_one_engine() -> None:
    of_two = replace(bench("serial", "burst"), engine="vllm"), replace(bench("sweep"), engine="embedded")
    assert status(contract(), *of_two)[4] == "partly"


def test_void_and_outdated_runs_prove_nothing() -> None:
    void = bench("serial", "burst", "sweep", verdict="void")
    outdated = Evidence.of("bench", {"points": [{"mode": "serial"}]}, current=False)
    assert status(contract(), void, outdated)[4] == "open"


def test_a_full_run_covers_quality_frontier_and_fleet(tmp_path: Path) -> None:
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "s.yaml").write_text("x")
    base = {"model": "m", "qps": 1, "input_tokens": 3, "output_tokens": 3, "quality_gate": "s"}
    gated = parse(base, base=tmp_path)
    summary = {"verdict": "pass", "points": [], "replicas": {"needed": 2, "started": 1}} | {
        "quality": {"bounds": {"worst": 1.0}},
        "proof": {"chats": []},
    }
    up = Evidence.of("up", summary, current=True)
    found = status(gated, up)
    assert (found[1], found[8], found[9]) == ("covered", "covered", "partly")
    failed = Evidence.of("eval", {"verdict": "not declared", "bounds": {"worst": 0.5}}, current=True)
    assert status(gated)[1] == status(gated, failed)[1] == "partly"
    right = Evidence.of("eval", {"verdict": "not declared", "bounds": {"worst": 1.0}}, current=True)
    assert status(gated, right)[1] == "covered"


def test_a_run_that_ended_before_it_served_shows_what_it_did(tmp_path: Path) -> None:
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "s.yaml").write_text("x")
    gated = parse({"model": "m", "qps": 1, "input_tokens": 3, "output_tokens": 3, "quality_gate": "s"}, base=tmp_path)
    summary: dict[str, object] = {
        "verdict": "fail",
        "points": [],
        "quality": {"verdict": "pass", "bounds": {"worst": 1.0}},
        "replicas": {"needed": None, "started": 0},
        "proof": None,
    }
    found = status(gated, Evidence.of("up", summary, current=True))
    assert (found[1], found[8], found[9]) == ("covered", "open", "open"), "the suite passed, the fleet never ran"

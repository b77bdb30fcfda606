"""The gates of `up`: what was promised, whether it held, and what that makes of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inferloop.backends.conformance import CheckResult
from inferloop.contract.workload import Contract
from inferloop.fleet.decide.fit import FitDecision
from inferloop.measure.frontier import Frontier
from inferloop.measure.verdict import Verdict, joint
from inferloop.plan.capacity import Sizing


@dataclass(frozen=True, slots=True)
class Gate:
    """`verdict` is a measure.verdict.Verdict, or "void" when the numbers must not be used."""

    name: str
    verdict: str
    reason: str


def overall(gates: Sequence[Gate]) -> str:
    """void beats everything; then any fail, then any doubt; gates that nobody declared count for nothing."""
    if any(gate.verdict == "void" for gate in gates):
        return "void"
    known: dict[str, Verdict] = {"pass": "pass", "fail": "fail", "not declared": "not declared"}
    return joint([known.get(gate.verdict, "inconclusive") for gate in gates])


def reasons(gates: Sequence[Gate]) -> list[str]:
    """What keeps the whole from passing."""
    return [f"{g.name}: {g.reason}" for g in gates if g.verdict not in ("pass", "not declared")]


def protocol_gate(checks: Sequence[CheckResult]) -> Gate:
    """Every check must pass or be refused by design."""
    failed = [check for check in checks if check.outcome == "failed"]
    refused = sum(check.outcome == "refused" for check in checks)
    if failed:
        return Gate("protocol", "fail", "; ".join(f"{check.name}: {check.reason}" for check in failed))
    return Gate("protocol", "pass", f"{len(checks) - refused} checks passed, {refused} refused by design")


def quality_gate(contract: Contract, summary: dict[str, Any] | None) -> Gate:
    """The suite's verdict, as evals judged it."""
    if contract.quality is None or summary is None:
        return Gate("quality", "not declared", "the contract names no suite")
    counts = summary["cases"]
    return Gate("quality", summary["verdict"], "; ".join(summary["reasons"]) or f"{counts['scored']} cases scored")


def objective_gate(bench_verdict: str, bench_reasons: Sequence[str], frontier: Frontier, share_qps: float) -> Gate:
    """The objectives at the peak. One replica was measured at the whole peak; when it cannot carry that alone, what
    counts is a certified rate, below every failing one, at or above the share that each of the started ones gets."""
    why = "; ".join(bench_reasons)
    if bench_verdict == "not declared":
        return Gate("objectives", "not declared", why or "the contract declares no objective")
    if bench_verdict in ("pass", "void"):
        return Gate("objectives", bench_verdict, why or "one replica alone kept them at the whole peak")
    kept_qps = frontier.capacity().low
    if kept_qps >= share_qps:
        return Gate(
            "objectives",
            "pass",
            f"each replica gets {share_qps:.3g} queries/s of the peak, and one alone kept them at {kept_qps:.3g}; "
            f"measured at the whole peak it was {bench_verdict}",
        )
    return Gate("objectives", bench_verdict, why or "not kept at the peak")


def fleet_gate(sizing: Sizing, fit: FitDecision) -> Gate:
    """Whether what runs here carries the peak. Missing spare replicas are said, and fail nothing: the contract
    promises latency and errors, not survival of a lost replica."""
    if not sizing.fits or sizing.needed is None:
        return Gate("fleet", "inconclusive" if sizing.undecided else "fail", sizing.reason)
    carrying = sizing.needed - sizing.failure_headroom
    if fit.start < carrying:
        short = carrying - fit.start
        return Gate("fleet", "fail", f"{short} of {carrying} replicas that carry the peak are missing: {_ran_out(fit)}")
    if fit.missing:
        return Gate(
            "fleet",
            "pass",
            f"{fit.start} started, which carry the peak; {fit.missing} spare missing ({_ran_out(fit)}), so while a "
            f"replica is restarted the promise does not hold",
        )
    return Gate("fleet", "pass", f"all {fit.start} started")


def cost_gate(contract: Contract) -> Gate:
    if contract.cost is None:
        return Gate("cost", "not declared", "the contract caps no cost")
    return Gate("cost", "inconclusive", "no price is known for this machine")


def _ran_out(fit: FitDecision) -> str:
    return "; ".join(fit.reasons) or "nothing more fits this machine"

"""The ten steps from a need to a tuned service, and how far a contract with its runs has come.

A step is settled by evidence, never by good intentions: what the contract declares counts as declared, and what a run
has shown counts as shown, as long as that run was of this very contract and is not void.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inferloop.contract.archetypes import PROFILES
from inferloop.contract.workload import Contract

Status = Literal["covered", "partly", "open"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one run can prove. `modes` are the load modes it offered; `current`: it was run for this contract."""

    run: str
    verb: str
    verdict: str
    current: bool
    modes: frozenset[str] = frozenset()
    quality_floor: float | None = None
    """The suite's score with every case without one counted as wrong; None: no suite was run."""
    sized: bool = False
    served: bool = False
    """Replicas ran behind a gateway and were asked."""

    @classmethod
    def of(cls, verb: str, summary: Mapping[str, Any], *, current: bool) -> Evidence:
        """From a run's summary; blocks that it lacks are simply not proven."""
        points = summary.get("points") or ()
        modes = frozenset(str(p["mode"]) for p in points if isinstance(p, Mapping) and p.get("mode"))
        floor = _block(summary if verb == "eval" else _block(summary, "quality"), "bounds").get("worst")
        replicas = _block(summary, "replicas")
        return cls(
            run=str(summary.get("run", "")),
            verb=verb,
            verdict=str(summary.get("verdict", "")),
            current=current,
            modes=modes,
            quality_floor=floor if isinstance(floor, int | float) else None,
            sized=replicas.get("needed") is not None,
            served=verb == "serve" or bool(replicas.get("started") and summary.get("proof")),
        )


def _block(summary: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = summary.get(name)
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    title: str
    status: Status
    detail: str
    todo: str | None = None
    """The command or the key that would bring it further."""


def checklist(contract: Contract, evidence: Sequence[Evidence] = ()) -> tuple[Step, ...]:
    """The ten steps in their order. Void runs and runs of another version of the contract prove nothing."""
    runs = [e for e in evidence if e.current and e.verdict != "void"]
    return (
        _quality(contract, runs),
        _workload(contract),
        _promise(contract),
        _frontier(runs),
        _by_run(5, "Choose the model: capability-bound or efficiency-bound", runs, "models", "inferloop models select"),
        _by_run(
            6, "Compare engines under the same workload", runs, "compare", "inferloop compare CONTRACT --targets A,B"
        ),
        _by_run(7, "Choose hardware: intensity, memory, interconnect", runs, "plan", "inferloop plan CONTRACT"),
        _fleet(runs),
        _observed(contract, runs),
        _by_run(
            10,
            "Optimize in order of size, behind gates, with a canary",
            runs,
            "optimize",
            "inferloop optimize CONTRACT",
        ),
    )


def _quality(contract: Contract, runs: Sequence[Evidence]) -> Step:
    title = "Define correctness and the loss that is allowed"
    gate = contract.quality
    if gate is None:
        return Step(1, title, "open", "no quality suite declared", "quality: {suite: ...}")
    name = gate.name or gate.suite
    judged = [r for r in runs if r.quality_floor is not None]
    if not judged:
        return Step(1, title, "partly", f"{name} declared, not run yet", "inferloop eval SUITE --target TARGET")
    floor = judged[-1].quality_floor
    if floor is None or floor < gate.minimum:
        said = f"{name} scored {floor:.3g} of {gate.minimum:g}: {judged[-1].run}"
        return Step(1, title, "partly", said, "the cases that failed")
    return Step(1, title, "covered", f"{name} was run: {judged[-1].run}")


def _workload(contract: Contract) -> Step:
    title = "Record traffic: rates, lengths, reuse, bursts, tool loop"
    traffic = contract.traffic
    missing = ["a peak above the average"] if traffic.qps.peak == traffic.qps.avg else []
    missing += [
        f"the spread of {name}"
        for name in ("input_tokens", "output_tokens")
        if all(len(getattr(part, name).points) < 2 for part in traffic.classes)
    ]
    if contract.archetype == "agent" and traffic.queries_per_request is None:
        missing.append("queries_per_request of the tool loop")
    if missing:
        return Step(2, title, "partly", f"missing: {', '.join(missing)}", "traffic: in the contract")
    return Step(2, title, "covered", "rates and lengths are declared as distributions")


def _promise(contract: Contract) -> Step:
    title = "Declare latency, cost and reliability objectives"
    slo, profile = contract.slo, PROFILES[contract.archetype]
    declared = {o.metric for o in slo.objectives}
    missing = [" or ".join(group) for group in profile.needs if not declared & set(group)]
    if not declared and not missing:
        missing.append("a latency objective")
    if slo.max_error_rate is None:
        missing.append("error_rate")
    if contract.cost is None:
        missing.append("cost")
    if not missing:
        return Step(3, title, "covered", ", ".join(o.label for o in slo.objectives))
    return Step(3, title, "partly" if declared else "open", f"not declared: {', '.join(missing)}", "slo: and cost:")


def _frontier(runs: Sequence[Evidence]) -> Step:
    title = "Measure one replica: serial, burst, rate sweep"
    modes = frozenset[str]().union(*(r.modes for r in runs))
    rates = modes - {"serial", "burst"}
    missing = [m for m in ("serial", "burst") if m not in modes] + ([] if rates else ["a rate sweep"])
    if not modes:
        return Step(4, title, "open", "nothing measured yet", "inferloop bench CONTRACT --target TARGET")
    if missing:
        return Step(4, title, "partly", f"missing: {', '.join(missing)}", "inferloop bench CONTRACT --target TARGET")
    return Step(4, title, "covered", f"measured: {next(r.run for r in reversed(runs) if r.modes)}")


def _fleet(runs: Sequence[Evidence]) -> Step:
    title = "Design the fleet: allocation, health, headroom, recovery"
    sized = [r for r in runs if r.sized]
    served = [r for r in sized if r.served]
    if served:
        return Step(8, title, "covered", f"sized and run: {served[-1].run}")
    if sized:
        return Step(8, title, "partly", f"sized, not run as a fleet: {sized[-1].run}", "inferloop up CONTRACT")
    return Step(8, title, "open", "not sized yet", "inferloop up CONTRACT")


def _observed(contract: Contract, runs: Sequence[Evidence]) -> Step:
    title = "Record events: tokens, stage times, replica, hardware, evals"
    capture = f"capture: {contract.privacy.capture}"
    served = [r for r in runs if r.served]
    if not served:
        return Step(9, title, "open", f"no service has run yet; {capture}", "inferloop up CONTRACT")
    if contract.privacy.capture == "none":
        return Step(9, title, "partly", "events without token ids", "privacy: {capture: token_ids}")
    return Step(9, title, "covered", f"{served[-1].run}; {capture}")


def _by_run(number: int, title: str, runs: Sequence[Evidence], verb: str, command: str) -> Step:
    done = [r for r in runs if r.verb == verb]
    if done:
        return Step(number, title, "covered", done[-1].run)
    return Step(number, title, "open", "no run yet", command)

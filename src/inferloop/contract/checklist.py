"""The ten steps from a need to a tuned service, and how far a contract with its runs has come.

A step is settled by evidence, never by good intentions: what the contract declares counts as declared, and what a run
has shown counts as shown, as long as that run was of this very contract and is not void.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from inferloop.contract.archetypes import PROFILES
from inferloop.contract.workload import Contract

Status = Literal["covered", "partly", "open"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one run can prove. `modes` are the load modes it offered; `current`: it was run for this contract. `engine`
    is what answered, as --target names it; `identity` what the run knows of its serving identity."""

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
    engine: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict)

    def is_of_what(self, other: Evidence) -> bool:
        """Whether the same answered in both, as far as they tell: a tuned engine is the same, other weights are not."""
        mine, theirs = self.identity, other.identity
        told = [key for key in _DECISIVE if mine.get(key) is not None and theirs.get(key) is not None]
        return self.engine == other.engine and all(mine[key] == theirs[key] for key in told)

    @classmethod
    def of(
        cls,
        verb: str,
        summary: Mapping[str, Any],
        *,
        current: bool,
        engine: str = "",
        identity: Mapping[str, Any] | None = None,
    ) -> Evidence:
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
            engine=engine,
            identity=identity or {},
        )


_DECISIVE = ("weights_digest", "precision", "tokenizer_digest", "template_digest", "adapter_digest")
"""Of a serving identity."""


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
    measured = next((r for r in reversed(runs) if r.modes), None)
    last = next((r for r in reversed(judged) if measured is None or r.is_of_what(measured)), None)
    if last is None:
        assert measured is not None, "else the newest had been taken"
        told = f"{name} was run{_on(judged[-1])} ({judged[-1].run}), "
        told += f"not{_on(measured)}, which was measured ({measured.run})"
        todo = f"inferloop eval SUITE --target {measured.engine or 'TARGET'}"
        if judged[-1].engine == measured.engine:
            told, todo = f"{told}: other weights or another precision", "the suite with the flags of that run"
        return Step(1, title, "partly", told, todo)
    floor = last.quality_floor
    if floor is None or floor < gate.minimum:
        said = f"{name} scored {floor:.3g} of {gate.minimum:g}{_on(last)}: {last.run}"
        return Step(1, title, "partly", said, "the cases that failed")
    return Step(1, title, "covered", f"{name} was run{_on(last)}: {last.run}")


def _on(run: Evidence) -> str:
    return f" on {run.engine}" if run.engine else ""


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
    measured = [r for r in runs if r.modes]
    same = [r for r in measured if r.is_of_what(measured[-1])]
    modes = frozenset[str]().union(*(r.modes for r in same))
    rates = modes - {"serial", "burst"}
    missing = [m for m in ("serial", "burst") if m not in modes] + ([] if rates else ["a rate sweep"])
    if not modes:
        return Step(4, title, "open", "nothing measured yet", "inferloop bench CONTRACT --target TARGET")
    if missing:
        told = f"missing{_on(same[-1])}: {', '.join(missing)}"
        return Step(4, title, "partly", told, "inferloop bench CONTRACT --target TARGET")
    return Step(4, title, "covered", f"measured{_on(same[-1])}: {same[-1].run}")


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

"""What a bench run found, and how it is told in summary.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inferloop.bench.calibrate import Calibration
from inferloop.core.digest import plain
from inferloop.core.units import figure
from inferloop.measure.frontier import Capacity, Frontier, FrontierPoint
from inferloop.measure.margin import MarginInterval
from inferloop.measure.samples import NOT_THE_SERVICE
from inferloop.measure.summary import Mode, PointSummary
from inferloop.measure.timing import DEFINITIONS
from inferloop.measure.verdict import SloVerdict

PEAK = "peak"
Role = Literal["bracket", "scout", "certified", "judged"]
"""bracket: serial and burst. scout: short, to find the edge; no percentile of it need be certain."""


@dataclass(frozen=True, slots=True)
class BenchPoint:
    """One load level. `void` is empty when its numbers may be used. Times in seconds include rendering and drain."""

    name: str
    mode: Mode
    offered_qps: float | None
    summary: PointSummary
    slo: SloVerdict
    void: tuple[str, ...]
    notes: tuple[str, ...]
    num_warmup: int
    elapsed_s: float
    role: Role = "certified"
    margin: MarginInterval | None = None

    @property
    def is_judged(self) -> bool:
        """Void numbers are judged by nothing, and no objective is meant for a burst."""
        return not self.void and self.mode != "burst"

    @property
    def verdict(self) -> str:
        if self.is_judged:
            return self.slo.verdict
        return "void" if self.void else "not judged"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": self.role,
            **self.summary.as_json(),
            "verdict": self.verdict,
            "slo": self.slo.as_json() if self.is_judged else None,
            "balance": self.slo.balance.as_json() if self.slo.balance else None,
            "margin": self.margin.as_json() if self.margin else None,
            "client_errors": sum(n for c, n in self.summary.errors["by_class"].items() if c in NOT_THE_SERVICE),
            "void": list(self.void),
            "notes": list(self.notes),
            "num_warmup": self.num_warmup,
            "elapsed_s": self.elapsed_s,
        }


@dataclass(frozen=True, slots=True)
class BenchResult:
    """`verdict` is about the contract's peak rate: pass | fail | inconclusive | void | not declared."""

    points: tuple[BenchPoint, ...]
    frontier: Frontier
    capacity: Capacity
    verdict: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    judged: BenchPoint | None
    calibration: Calibration | None = None

    @property
    def sets_own_rate(self) -> bool:
        """What was judged is a load of which no capacity follows: a trace, a profile, a closed loop, a burst."""
        return self.judged is not None and self.judged.role == "judged" and self.judged.name != PEAK

    def as_summary(self) -> dict[str, Any]:
        """`replicas` is added by whoever sizes."""
        return {
            "kind": "bench",
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "points": [point.as_json() for point in self.points],
            "slo": self.judged.slo.as_json() if self.judged and self.judged.is_judged else None,
            "judged_point": self.judged.name if self.judged else None,
            "capacity": plain(self.capacity),
            "calibration": plain(self.calibration),
            "definitions": dict(DEFINITIONS),
        }


def frontier_of(points: Sequence[BenchPoint]) -> Frontier:
    """The open points whose numbers may be used. A window of some hundred arrivals may by chance have been lighter than
    the rate it was drawn for: then it stands for what really arrived, and for no more than was asked when heavier. One
    that passes stands for no more than it completed."""
    idle = next((p.margin.margin for p in points if p.mode == "serial" and p.margin and not p.void), None)
    found = (
        FrontierPoint(
            _rate(p.offered_qps, p.summary.arrival_qps, p.slo),
            p.summary.achieved_qps,
            p.summary.output_tok_s,
            p.slo.verdict,
            p.slo.margin,
            margin_low=p.margin.low if p.margin else None,
            margin_high=p.margin.high if p.margin else None,
            arrival_qps=p.summary.arrival_qps,
            is_scout=p.role == "scout",
            balance=p.slo.balance,
            asked_qps=p.offered_qps,
        )
        for p in points
        if p.mode == "open" and p.offered_qps is not None and not p.void
    )
    return Frontier.of(found, idle)


def _rate(offered_qps: float, arrival_qps: float | None, slo: SloVerdict) -> float:
    rate = offered_qps if arrival_qps is None else min(offered_qps, arrival_qps)
    return min(rate, slo.balance.completed_qps) if slo.balance is not None and slo.verdict == "pass" else rate


def saturated(points: Sequence[BenchPoint]) -> Capacity:
    """Capacity of a service that declares no objective: the most it completes."""
    burst = next((p.summary for p in points if p.mode == "burst" and not p.void), None)
    if burst is None or not burst.achieved_qps:
        return Capacity(0.0, 0.0, None, "none", True, "nothing completed in the burst")
    qps = burst.achieved_qps
    why = "no objective is declared: the rate at which a burst completed"
    if burst.achieved_basis == "in flight":
        why += f"; all of it was in flight at once ({burst.num_requests}), and more may be completed of more"
    return Capacity(qps, qps, None, "saturated", True, why)


def describe(point: BenchPoint) -> str:
    """One line for people."""
    s = point.summary
    rate = "" if s.achieved_qps is None else f"{figure(s.achieved_qps)} queries/s"
    if point.slo.balance is not None and point.slo.balance.verdict != "sustained":
        rate = point.slo.balance.reason
    tokens = "" if s.output_tok_s is None else f"{figure(s.output_tok_s)} tok/s"
    name = point.name if point.offered_qps is None else f"{point.name} at {figure(point.offered_qps)}/s"
    return ", ".join(part for part in (f"{name}: {point.verdict}", rate, tokens, *point.void) if part)


def failure_of(point: BenchPoint) -> str:
    """Why nothing was measured at a level at which nothing succeeded."""
    by_class = point.summary.errors["by_class"]
    return f"no request succeeded ({', '.join(f'{n} {c}' for c, n in by_class.items()) or 'none was answered'})"

"""What a comparison found, and how it is told in summary.json."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

from inferloop.bench.reuse import Reuse
from inferloop.core.slo import Slo
from inferloop.core.units import figure
from inferloop.measure.balance import Balance
from inferloop.measure.bootstrap import BlockBootstrap
from inferloop.measure.columns import Columns
from inferloop.measure.latency import Latency
from inferloop.measure.paired import Difference, Pair, Seen, decide, see
from inferloop.measure.pareto import Better, dominated_by
from inferloop.measure.quantiles import min_samples
from inferloop.measure.samples import CENSORED, collect
from inferloop.measure.summary import achieved_rate, count_errors, token_rate
from inferloop.measure.timing import DEFINITIONS, RequestTiming
from inferloop.measure.verdict import judge

Stage = Literal["self", "versus"]
_CUT_SHARE = 0.05
_LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "ttlt_ms", "queue_ms")


@dataclass(frozen=True, slots=True)
class Side:
    """One target: its letter, what the user called it, what it was started with, what it says it is."""

    label: str
    name: str
    told: Mapping[str, Any]
    identity: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class SideWindow:
    """One measured window of one target. `timings` by the request's place in the plan; `void` is empty when its numbers
    may be used; `prompts` is the digest of what was sent; `balance` is arrivals against completions, None where too few
    arrived to tell; `reuse` is what the prefix cache did, None without an answer."""

    stage: Stage
    label: str
    rate: float
    number: int
    timings: Mapping[int, RequestTiming]
    void: tuple[str, ...]
    notes: tuple[str, ...]
    prompts: str
    name: str
    balance: Balance | None = None
    reuse: Reuse | None = None

    @property
    def rows(self) -> list[RequestTiming]:
        return [self.timings[i] for i in sorted(self.timings)]

    @property
    def text(self) -> str:
        rate = token_rate(self.rows)
        tokens = "" if rate is None else f", {figure(rate)} tok/s"
        return f"{self.name}: {len(self.timings)} requests{tokens}" + "".join(f", void: {text}" for text in self.void)


@dataclass(frozen=True)
class CompareResult:
    """`sides[0]` is what the others are compared with."""

    slo: Slo
    sides: tuple[Side, ...]
    windows: tuple[SideWindow, ...]
    rates: tuple[float, ...]
    notes: tuple[str, ...]
    path: str

    @cached_property
    def differences(self) -> dict[tuple[str, float], list[Difference]]:
        """Of each target but the first, at each rate. All that is said of one target is judged together."""
        first = self.sides[0].label
        return {
            (side.label, rate): differences
            for side in self.sides[1:]
            for rate, differences in self._between[first, side.label].items()
        }

    @cached_property
    def _between(self) -> dict[tuple[str, str], dict[float, list[Difference]]]:
        """Of each target and each later one, at each rate. All that is said of two targets is judged together; chance
        between windows is known of the first target alone, and taken to be the same for all."""
        found: dict[tuple[str, str], dict[float, list[Difference]]] = {}
        for one, other in combinations([side.label for side in self.sides], 2):
            seen = {rate: self._seen(one, other, rate) for rate in self.rates}
            total = sum(len(figures) for figures in seen.values())
            found[one, other] = {rate: decide(figures, num_compared=total) for rate, figures in seen.items()}
        return found

    @cached_property
    def points(self) -> list[dict[str, Any]]:
        """One per target and rate with a usable window; latencies of all its windows together, rates averaged."""
        found = [self._point(side, rate) for side in self.sides for rate in self.rates]
        points = [point for point in found if point["num_requests"]]
        for rate in self.rates:
            rivals = [p for p in points if p["offered_qps"] == rate]
            figures = self._ranking_figures(rivals)
            calls = [[self._calls(p["target"], q["target"], rate, figures) for q in rivals] for p in rivals]
            by = dominated_by(len(rivals), lambda i, j, calls=calls: calls[i][j])  # type: ignore[misc]
            for j, (point, winner) in enumerate(zip(rivals, by, strict=True)):
                point["dominated_by"] = None if winner is None else rivals[winner]["name"]
                point["ranked_by"] = list(figures) if any(calls[i][j] for i in range(len(rivals))) else []
        return points

    @property
    def verdict(self) -> str:
        """Nothing is asked of a comparison; it is void when no target could be compared with the first."""
        return "void" if len(self.voids) >= len(self.sides) - 1 else "not declared"

    @cached_property
    def voids(self) -> dict[str, str]:
        """Targets that could not be compared with the first, and why. They take nothing from the others."""
        first = self.sides[0].label
        found = {}
        for side in self.sides[1:]:
            if any(self._pairs("versus", first, side.label, rate) for rate in self.rates):
                continue
            culprit = side.label if not self._has_usable(side.label) else first
            reasons = Counter(text for w in self.windows if w.label == culprit for text in w.void)
            why = f": {reasons.most_common(1)[0][0]}" if reasons else ""
            whose = "" if culprit == side.label else f", whose own windows are void{why}"
            found[side.label] = f"{side.label} has no pair of usable windows with {first}{whose or why}"
        return found

    @property
    def reasons(self) -> list[str]:
        return list(self.voids.values())

    def _has_usable(self, label: str) -> bool:
        return any(w.label == label and w.stage == "versus" and not w.void for w in self.windows)

    def as_summary(self) -> dict[str, Any]:
        voids = [f"{w.name} is void and left out: {'; '.join(w.void)}" for w in self.windows if w.void]
        return {
            "kind": "compare",
            "verdict": self.verdict,
            "reasons": self.reasons,
            "notes": list(dict.fromkeys([*self.notes, *voids, *self._window_notes(), *self._small()])),
            "path": self.path,
            "targets": [
                {
                    **side.told,
                    "identity": side.identity,
                    "void": self.voids.get(side.label),
                    "reuse": _reuse_of([w for rate in self.rates for w in self._usable("versus", side.label, rate)]),
                }
                for side in self.sides
            ],
            "points": self.points,
            "comparisons": [
                {"target": label, "against": self.sides[0].label, "offered_qps": rate, **d.as_json()}
                for (label, rate), differences in self.differences.items()
                for d in differences
            ],
            "self": [
                {"offered_qps": rate, "figure": s.figure.name, "differences": [_finite(d) for d in s.scatter]}
                for rate in self.rates
                for s in see(self._pairs("self", *self._twins, rate), (), self.slo)
            ],
            "definitions": dict(DEFINITIONS),
        }

    def _window_notes(self) -> list[str]:
        """Those that differ in nothing but their numbers are told once."""
        alike: dict[str, list[str]] = {}
        for window in self.windows:
            for text in window.notes:
                alike.setdefault(re.sub(r"[\d.]+", "#", text), []).append(f"{window.name}: {text}")
        return [
            found[0] + (f" (and so in {len(found) - 1} other windows)" if found[1:] else "") for found in alike.values()
        ]

    def _small(self) -> list[str]:
        """Where too few requests were sent for a p95, and how many it takes."""
        least = min_samples(0.95)
        sent = {rate: min((p["num_requests"] for p in self.points if p["offered_qps"] == rate), default=0)
                for rate in self.rates}  # fmt: skip
        return [
            f"at {rate:g}/s {num} requests certify no p95: that takes {least}, in more rounds or longer windows"
            for rate, num in sent.items()
            if 0 < num < least
        ]

    @property
    def _twins(self) -> tuple[str, str]:
        return f"{self.sides[0].label}1", f"{self.sides[0].label}2"

    def _seen(self, one: str, other: str, rate: float) -> list[Seen]:
        pairs = self._pairs("versus", one, other, rate)
        return see(pairs, self._pairs("self", *self._twins, rate), self.slo)

    def _pairs(self, stage: Stage, one: str, other: str, rate: float) -> list[Pair]:
        """Windows of the same round, where both may be used, with the requests that both have."""
        found: list[Pair] = []
        for a in self._usable(stage, one, rate):
            for b in self._usable(stage, other, rate):
                both = sorted(a.timings.keys() & b.timings.keys())
                if a.number == b.number and both:
                    found.append(([a.timings[i] for i in both], [b.timings[i] for i in both]))
        return found

    def _usable(self, stage: Stage, label: str, rate: float) -> list[SideWindow]:
        found = [w for w in self.windows if (w.stage, w.label, w.rate) == (stage, label, rate) and not w.void]
        return sorted(found, key=lambda w: w.number)

    def _point(self, side: Side, rate: float) -> dict[str, Any]:
        usable = self._usable("versus", side.label, rate)
        windows = [w.rows for w in usable]
        rows = [r for window in windows for r in window]
        c = Columns.of(rows)
        bootstrap = BlockBootstrap.of(c.send)
        slo = judge(self.slo, rows)
        return {
            "name": f"{side.label} at {rate:g}/s",
            "target": side.label,
            "mode": "open",
            "offered_qps": rate,
            "achieved_qps": _mean([achieved_rate(w)[0] for w in windows]),
            "output_tok_s": _mean([token_rate(w) for w in windows]),
            "goodput_qps": _mean([judge(self.slo, w).goodput_qps for w in windows]) if self.slo.objectives else None,
            "num_requests": len(rows),
            "num_windows": len(windows),
            **{m: Latency.of(collect(m, c), bootstrap).as_json() for m in _LATENCIES},
            **{
                f"response_{m}": Latency.of(collect(m, c, from_intended=True), bootstrap).as_json()
                for m in ("ttft_ms", "ttlt_ms")
            },
            "errors": count_errors(rows),
            "saturated": _is_saturated(usable),
            "num_censored": sum(r.error == CENSORED for r in rows),
            "num_input_tokens": sum(r.num_input_tokens for r in rows),
            "num_output_tokens": sum(r.num_output_tokens for r in rows),
            "num_cached_tokens": sum(r.num_cached_tokens for r in rows),
            "reuse": _reuse_of(usable),
            "certified": min_samples(0.95) <= len(rows),
            "slo_verdict": slo.verdict if self.slo.objectives else "not declared",
        }

    def _ranking_figures(self, rivals: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Throughput, TTFT, TPOT; p95 where all that are compared can certify it, else p50."""
        known = all(_percentile(p[m], "p95") is not None for p in rivals for m in ("ttft_ms", "tpot_ms"))
        percentile = "p95" if known else "p50"
        gain = "goodput_qps" if self.slo.objectives else "output_tok_s"
        return (gain, f"ttft_ms {percentile}", f"tpot_ms {percentile}")

    def _calls(self, one: str, other: str, rate: float, figures: Sequence[str]) -> list[Better]:
        """Whether `one` is better than `other`, figure by figure; empty unless all of them are known of both."""
        forwards = (one, other) in self._between
        found = self._between[(one, other) if forwards else (other, one)][rate] if one != other else []
        of = {d.figure.name: d for d in found}
        if not all(name in of for name in figures):
            return []
        calls = [of[name].better for name in figures]
        return [None if better is None else not better for better in calls] if forwards else calls


def _reuse_of(windows: Sequence[SideWindow]) -> dict[str, Any] | None:
    found = Reuse.joined([w.reuse for w in windows if w.reuse is not None])
    return None if found is None else found.as_json()


def _is_saturated(windows: Sequence[SideWindow]) -> bool | None:
    """Whether the queue grew in most of the windows that can tell; None where none can. What was still unanswered when
    the window was given up is a queue as well."""
    told = []
    for window in windows:
        num_cut = sum(t.error == CENSORED for t in window.timings.values())
        if num_cut > _CUT_SHARE * len(window.timings):
            told.append(True)
        elif window.balance is not None and window.balance.verdict != "undecided":
            told.append(window.balance.verdict == "saturated")
    return sum(told) > len(told) / 2 if told else None


def _percentile(latency: Mapping[str, Any], name: str) -> float | None:
    return math.inf if name in latency["infinite"] else latency[name]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

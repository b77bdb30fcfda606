"""What loads but deserves a word: promises that cannot be proven, assumptions that flatter, parts that are missing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from inferloop.contract.archetypes import PROFILES
from inferloop.contract.course import highest_share
from inferloop.contract.distributions import percentile_key
from inferloop.contract.quantile import QuantileFunction
from inferloop.contract.workload import PRECISIONS, Contract, Distribution, ModelRef, Precision, TrafficClass
from inferloop.core.errors import nearest
from inferloop.core.slo import Slo

Severity = Literal["note", "warning"]
SAMPLES_PER_TAIL = 6.64
"""Requests needed to certify the p-quantile, times 1 - p: one request may be over and it still holds with 99 %
confidence (binomial early stopping, as in MLPerf LoadGen)."""
LONG_TAIL = 4.0
_PEAK_TOLERANCE = 0.05
MIX_TOLERANCE = 0.25
_LIKE_A_PRECISION = re.compile(r"(fp|bf|int|q)\d+(_\w+)?")


@dataclass(frozen=True, slots=True)
class Finding:
    """`rule` is stable and may be looked up; `key` is where in the full form it applies."""

    severity: Severity
    rule: str
    key: str
    message: str


def lint(contract: Contract) -> list[Finding]:
    """All findings, warnings first, otherwise in the order of the file."""
    found = [finding for rule in _RULES for finding in rule(contract)]
    return sorted(found, key=lambda f: f.severity != "warning")


def _model(contract: Contract) -> Iterator[Finding]:
    for key, model in model_keys(contract):
        ending = model.id.rpartition("-")[2].lower()
        if model.precision == Precision() and _LIKE_A_PRECISION.fullmatch(ending):
            close = nearest(ending, PRECISIONS)
            meant = f", did you mean {close}?" if close and close != ending else ""
            text = f"{ending!r} is taken as part of the name, and the model runs as stored{meant}"
            yield Finding("note", "precision-in-name", f"{key}.precision", text)


def model_keys(contract: Contract) -> list[tuple[str, ModelRef]]:
    """Every model that the contract names, with its key in the full form."""
    if contract.routing is None:
        return [("model", contract.model)]
    return [(f"models.{m.name}", m.ref) for m in contract.routing.models]


def _headroom(contract: Contract) -> Iterator[Finding]:
    qps = contract.traffic.qps
    if qps.peak == qps.avg:
        text = f"peak equals the average ({qps.avg:g}); traffic has bursts, and the fleet is sized for the peak"
        yield Finding("warning", "no-peak", "traffic.qps", text)
    elif qps.peak == qps.p95:
        yield Finding("note", "no-peak", "traffic.qps", f"peak equals p95 ({qps.p95:g}); is that the highest minute?")
    profile = contract.traffic.rate_profile
    if profile:
        text = "the search for the capacity offers steady rates; `bench --profile` plays the profile"
        yield Finding("note", "profile-apart", "traffic.rate_profile", text)
        highest = qps.avg * highest_share(profile)
        if highest > qps.peak * (1 + _PEAK_TOLERANCE):
            text = f"with its mean at {qps.avg:g} it rises to {highest:.3g}, above the peak that the fleet is sized for"
            yield Finding("warning", "profile-above-peak", "traffic.qps.peak", text)
    if contract.traffic.arrivals.process == "trace":
        text = "the trace has its own rates and lengths; qps and tokens here describe it to people and to the sizing"
        yield Finding("note", "trace-has-rates", "traffic.arrivals", text)


def _lengths(contract: Contract) -> Iterator[Finding]:
    for part, where in _parts(contract):
        for name in ("input_tokens", "output_tokens"):
            if len(getattr(part, name).points) == 1 and len(contract.traffic.classes) == 1:
                text = "has one value only, so every request has the same length; real lengths vary: give p50 and p95"
                yield Finding("warning", "constant-length", f"{where}.{name}", text)
        shortest = 1.0 - 1.0 / QuantileFunction(part.input_tokens).mean()
        if part.prefix_reuse > shortest:
            text = f"prompts are too short to repeat {part.prefix_reuse:.0%} of their tokens and still differ"
            yield Finding("warning", "reuse-impossible", f"{where}.prefix_reuse", text)
    if len(contract.traffic.classes) == 1 and _has_long_tail(contract.traffic.input_tokens):
        text = (
            "input and output lengths are drawn independently, so long prompts, long answers and peaks do not coincide "
            "as they do in production; classes let them"
        )
        yield Finding("note", "independent-lengths", "traffic.classes", text)


def _mix(contract: Contract) -> Iterator[Finding]:
    classes = contract.traffic.classes
    if len(classes) == 1:
        return
    for name in ("input_tokens", "output_tokens"):
        declared: Distribution = getattr(contract.traffic, name)
        for quantile, value in declared.points:
            mixed = _mixture_quantile([(c.share, getattr(c, name)) for c in classes], quantile)
            if 0.0 < quantile < 1.0 and abs(mixed - value) > MIX_TOLERANCE * value:
                key = percentile_key(quantile)
                text = (
                    f"the classes together have {key} {mixed:.0f}, not {value:g}; requests are drawn from the classes"
                )
                yield Finding("warning", "mix-differs", f"traffic.{name}.{key}", text)


def _objectives(contract: Contract) -> Iterator[Finding]:
    slo, profile = contract.slo, PROFILES[contract.archetype]
    if not slo.objectives:
        yield Finding("warning", "no-objective", "slo", "no latency objective, so no verdict can be given")
    elif not any(o.quantile >= 0.9 for o in slo.objectives):
        yield Finding("warning", "no-tail", "slo", "no objective at p90 or above; a median hides every bad minute")
    for objective in slo.objectives:
        needed = math.ceil(SAMPLES_PER_TAIL / (1.0 - objective.quantile))
        if objective.quantile > 0.95:
            minutes = needed / contract.traffic.qps.avg / 60
            key = percentile_key(objective.quantile)
            text = f"{key} takes about {needed} requests to certify, {minutes:.0f} min at the average rate"
            yield Finding("note", "slow-to-certify", f"slo.{objective.metric}.{key}", text)
    declared = {o.metric for o in slo.objectives}
    for group in profile.needs if slo.objectives else ():
        if not declared & set(group):
            text = f"{contract.archetype} is read by {profile.consumer}: declare {' or '.join(group)}"
            yield Finding("warning", "archetype-objective", f"slo.{group[0]}", text)
    if profile.needs_cost and contract.cost is None:
        text = f"{contract.archetype} is judged by {profile.figure_of_merit}: declare a cost"
        yield Finding("warning", "archetype-cost", "cost", text)
    if slo.max_error_rate is None:
        yield Finding(
            "note", "no-error-rate", "slo.error_rate", "not declared; failures then have no verdict of their own"
        )


def _consistency(contract: Contract) -> Iterator[Finding]:
    limits = {(o.metric, o.quantile): o.limit for o in contract.slo.objectives}
    for (metric, quantile), limit in limits.items():
        key = percentile_key(quantile)
        outside = {(o.metric, o.quantile): o.limit for o in (contract.sla or Slo()).objectives}.get((metric, quantile))
        if outside is not None and outside < limit:
            text = f"promises {outside:g} ms outside, but the internal objective allows {limit:g} ms"
            yield Finding("warning", "sla-stricter", f"sla.{metric}.{key}", text)
        if metric != "ttlt_ms":
            continue
        first, per_token = limits.get(("ttft_ms", quantile)), limits.get(("tpot_ms", quantile))
        if first is not None and per_token is not None:
            tokens = QuantileFunction(contract.traffic.output_tokens)(0.5)
            median_ms = first + (tokens - 1) * per_token  # T_last = T_first + (L_out - 1) * T_pot
            if limit < median_ms:
                text = f"{limit:g} ms is tighter than ttft and tpot together allow a median answer ({median_ms:.0f} ms)"
                yield Finding("note", "ttlt-binds", f"slo.ttlt_ms.{key}", text)


def _archetype(contract: Contract) -> Iterator[Finding]:
    traffic = contract.traffic
    if PROFILES[contract.archetype].shares_prefixes and all(c.prefix_reuse == 0 for c in traffic.classes):
        text = "an agent sends its history again at every turn; without reuse the prefix cache is never exercised"
        yield Finding("warning", "agent-without-reuse", "traffic.prefix_reuse", text)
    if (traffic.queries_per_request or traffic.turns) and all(c.prefix_reuse == 0 for c in traffic.classes):
        text = "0 is declared, but the calls of a conversation repeat all that was said before"
        yield Finding("warning", "conversation-without-reuse", "traffic.prefix_reuse", text)
    if contract.archetype == "agent" and traffic.queries_per_request is None:
        text = "not declared; a tool loop makes several model queries of one request"
        yield Finding("note", "agent-without-loop", "traffic.queries_per_request", text)


def _gates(contract: Contract) -> Iterator[Finding]:
    if contract.quality is None:
        yield Finding("note", "no-quality", "quality", "not declared; a faster service may then answer worse unnoticed")
    if contract.privacy.capture == "text" and contract.privacy.retain_days > 30:
        text = f"texts of users are kept for {contract.privacy.retain_days} days; is that agreed with them?"
        yield Finding("note", "long-retention", "privacy.retain_days", text)


def _routing(contract: Contract) -> Iterator[Finding]:
    routing = contract.routing
    if routing is None:
        return
    begins = {routing.default, *(rule.model for rule in routing.rules)}
    escalation = routing.escalation
    reached = begins | set(escalation.to if escalation else ())
    for model in routing.models:
        if model.name not in reached:
            text = "no rule and no escalation leads here; only requests that name it do"
            yield Finding("note", "model-unused", f"models.{model.name}", text)
    checks_json = escalation is not None and escalation.invalid_json
    checks_tools = escalation is not None and escalation.refused_tool
    for i, rule in enumerate(routing.rules):
        checked = checks_json if rule.expect == "json" else checks_tools
        if rule.expect and not (checked and escalation and rule.model == escalation.source):
            text = f"{rule.expect} is expected of {rule.model}, but no escalation checks it there"
            yield Finding("warning", "expect-unchecked", f"routing.rules[{i}].expect", text)
    if escalation is None:
        return
    if escalation.source not in begins:
        text = f"no request begins at {escalation.source}: it is neither the default nor in a rule"
        yield Finding("warning", "escalation-unreached", "routing.escalation.from", text)
    first = routing.model(escalation.source)
    unpriced = [name for name in (first.name, *escalation.to) if routing.model(name).price is None]
    if unpriced:
        text = f"{', '.join(unpriced)} without usd_per_mtok: what an escalation costs stays unknown"
        yield Finding("note", "no-price", "models", text)
    for name in escalation.to:
        other = routing.model(name)
        if other.ref == first.ref:
            text = f"{name} is the same model in the same precision as {first.name} and fails where it does"
            yield Finding("warning", "escalation-same", "routing.escalation.to", text)
        elif first.price and other.price and other.price.output < first.price.output:
            text = f"{name} is cheaper than {first.name}; ask it first"
            yield Finding("warning", "escalation-cheaper", "routing.escalation.to", text)


_RULES: tuple[Callable[[Contract], Iterator[Finding]], ...] = (
    _model,
    _routing,
    _headroom,
    _lengths,
    _mix,
    _objectives,
    _consistency,
    _archetype,
    _gates,
)


def _parts(contract: Contract) -> list[tuple[TrafficClass, str]]:
    classes = contract.traffic.classes
    if len(classes) == 1:
        return [(classes[0], "traffic")]
    return [(part, f"traffic.classes[{i}]") for i, part in enumerate(classes)]


def _has_long_tail(distribution: Distribution) -> bool:
    p50, p95 = (QuantileFunction(distribution)(q) for q in (0.5, 0.95))
    return p95 > LONG_TAIL * p50


def _mixture_quantile(parts: list[tuple[float, Distribution]], quantile: float) -> float:
    """The quantile of a mix, from the quantile functions of its parts."""
    steps = 400
    weighted = sorted(
        (QuantileFunction(d)((i + 0.5) / steps), share / steps) for share, d in parts for i in range(steps)
    )
    total = 0.0
    for value, weight in weighted:
        total += weight
        if total >= quantile:
            return value
    return weighted[-1][0]

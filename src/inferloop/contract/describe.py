"""A contract back in the words of its file: the full form as plain values, ready for JSON, TOML or YAML."""

from __future__ import annotations

from typing import Any

from inferloop.contract.distributions import percentile_key
from inferloop.contract.traffic import DEFAULT_CLASS, duration_text
from inferloop.contract.workload import (
    Arrivals,
    Contract,
    Distribution,
    Escalation,
    EvalTag,
    ModelRef,
    Traffic,
    TrafficClass,
)
from inferloop.core.slo import Slo


def describe(contract: Contract) -> dict[str, Any]:
    """`parse(describe(c), base=...)` equals `c` but for its source, given that the files it names are still there."""
    result: dict[str, Any] = {
        "version": contract.version,
        "service": contract.service,
        "archetype": contract.archetype,
        **_models(contract),
        "traffic": _traffic(contract.traffic),
        "slo": _slo(contract.slo),
    }
    if contract.sla is not None:
        result["sla"] = _slo(contract.sla)
    if contract.quality is not None:
        gate = {"suite": contract.quality.name or contract.quality.suite}
        result["quality"] = gate | _present(contract.quality, "minimum allowed_loss")
    if contract.cost is not None:
        result["cost"] = _present(contract.cost, "usd_per_hour usd_per_mtok")
    result["privacy"] = {"capture": contract.privacy.capture, "retain_days": contract.privacy.retain_days}
    return result


def _models(contract: Contract) -> dict[str, Any]:
    routing = contract.routing
    if routing is None:
        return {"model": _model(contract.model)}
    models = {m.name: _model(m.ref) for m in routing.models}
    for m in routing.models:
        if m.price is not None:
            models[m.name]["usd_per_mtok"] = _present(m.price, "input cached_input output")
        if m.replicas != 1:
            models[m.name]["replicas"] = m.replicas
    routes: dict[str, Any] = {"default": routing.default}
    if routing.rules:
        routes["rules"] = [
            {"class": rule.traffic_class, "model": rule.model} | _present(rule, "expect") for rule in routing.rules
        ]
    if routing.eval_tags:
        routes["eval_tags"] = {tag.name: _tag(tag) for tag in routing.eval_tags}
    if routing.escalation is not None:
        routes["escalation"] = _escalation(routing.escalation)
    return {"models": models, "routing": routes}


def _model(model: ModelRef) -> dict[str, Any]:
    return {"id": model.id, "precision": _present(model.precision, "weights activations kv")}


def _tag(tag: EvalTag) -> dict[str, Any]:
    lists = {name: list(getattr(tag, name)) for name in ("contains", "lacks") if getattr(tag, name)}
    return lists | _present(tag, "regex")


def _escalation(escalation: Escalation) -> dict[str, Any]:
    checks: list[Any] = [name for name in ("invalid_json", "refused_tool", "unavailable") if getattr(escalation, name)]
    if escalation.low_logprob is not None:
        checks.append({"low_logprob": escalation.low_logprob})
    if escalation.eval_tags:
        checks.append({"eval_tag": list(escalation.eval_tags)})
    return {"from": escalation.source, "to": list(escalation.to), "on": checks, "max_hops": escalation.max_hops}


def _traffic(traffic: Traffic) -> dict[str, Any]:
    qps, arrivals = traffic.qps, traffic.arrivals
    result: dict[str, Any] = {
        "qps": {"avg": qps.avg, "p95": qps.p95, "peak": qps.peak, "window": qps.window},
        "arrivals": _arrivals(arrivals),
        "input_tokens": _distribution(traffic.input_tokens),
        "output_tokens": _distribution(traffic.output_tokens),
        "prefix_reuse": traffic.prefix_reuse,
    }
    if traffic.rate_profile is not None:
        result["rate_profile"] = _present(traffic.rate_profile, "file time_scale")
    for name in ("queries_per_request", "tool_ms", "turns", "think_ms"):
        value: Distribution | None = getattr(traffic, name)
        if value is not None:
            result[name] = _distribution(value)
    whole = TrafficClass(DEFAULT_CLASS, 1.0, traffic.input_tokens, traffic.output_tokens, traffic.prefix_reuse)
    if traffic.classes != (whole,):
        result["classes"] = [_class(c) for c in traffic.classes]
    return result


def _arrivals(arrivals: Arrivals) -> dict[str, Any]:
    result: dict[str, Any] = {"process": arrivals.process}
    if arrivals.process == "gamma":
        result["cv"] = arrivals.cv
    if arrivals.ramp is not None:
        ramp = arrivals.ramp
        result["ramp"] = {"shape": ramp.shape, "from": ramp.start, "to": ramp.end, "over": duration_text(ramp.seconds)}
    if arrivals.users is not None:
        result["users"] = arrivals.users
    if arrivals.think_ms is not None:
        result["think_ms"] = _distribution(arrivals.think_ms)
    if arrivals.trace is not None:
        result |= _present(arrivals.trace, "file format time_scale max_requests max_context")
    return result


def _class(part: TrafficClass) -> dict[str, Any]:
    return {
        "name": part.name,
        "share": part.share,
        "input_tokens": _distribution(part.input_tokens),
        "output_tokens": _distribution(part.output_tokens),
        "prefix_reuse": part.prefix_reuse,
    }


def _distribution(distribution: Distribution) -> dict[str, float]:
    return {percentile_key(quantile): value for quantile, value in distribution.points}


def _slo(slo: Slo) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for objective in slo.objectives:
        result.setdefault(objective.metric, {})[percentile_key(objective.quantile)] = objective.limit
    if slo.max_error_rate is not None:
        result["error_rate"] = slo.max_error_rate
    result["window"] = duration_text(slo.window_s)
    result["scope"] = list(slo.scope) or "all"
    result["network_ms"] = slo.network_ms
    return result


def _present(value: object, names: str) -> dict[str, Any]:
    found = {name: getattr(value, name) for name in names.split()}
    return {name: item for name, item in found.items() if item is not None}

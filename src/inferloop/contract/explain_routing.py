"""The routes of a service in sentences, for people who want to know what their contract does."""

from __future__ import annotations

from collections.abc import Iterator

from inferloop.contract.workload import Escalation, NamedModel, Precision, Routing


def explain(routing: Routing) -> Iterator[str]:
    """One line per model, per rule, and for the escalation."""
    for model in routing.models:
        how_many = "as many replicas as measuring tells" if model.name == routing.default else _counted(model.replicas)
        yield f"model {model.name}: {_described(model)}; {how_many}"
    for rule in routing.rules:
        expected = {"json": ", answers must be JSON", "tool_call": ", answers must call a tool", None: ""}[rule.expect]
        yield f"route class {rule.traffic_class} -> {rule.model}{expected}"
    yield f"route everything else -> {routing.default}"
    if routing.escalation is not None:
        yield _escalation(routing.escalation)


def _counted(replicas: int) -> str:
    return f"{replicas} replica{'s' if replicas > 1 else ''}, not measured"


def _described(model: NamedModel) -> str:
    asked = model.ref.precision
    words = [f"{part} {value}" for part in ("weights", "activations", "kv") if (value := getattr(asked, part))]
    precision = "as stored" if asked == Precision() else ", ".join(words)
    if model.price is None:
        return f"{model.ref.id}, {precision}, no price"
    price = model.price
    told = f"{price.input:g} in, {price.cached_input:g} cached, {price.output:g} out"
    return f"{model.ref.id}, {precision}, USD per million tokens: {told}"


def _escalation(escalation: Escalation) -> str:
    failed = [name for name in ("invalid_json", "refused_tool", "unavailable") if getattr(escalation, name)]
    if escalation.low_logprob is not None:
        failed.append(f"low_logprob below {escalation.low_logprob:g}")
    failed += [f"eval_tag {name}" for name in escalation.eval_tags]
    chain = " -> ".join((escalation.source, *escalation.to))
    return f"escalate {chain} on {', '.join(failed)}; at most {escalation.max_hops} models are asked"

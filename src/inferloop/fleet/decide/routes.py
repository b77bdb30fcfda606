"""Which model a request begins at, and who is asked after an answer that does not hold. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from inferloop.contract.traffic import DEFAULT_CLASS
from inferloop.contract.workload import Routing, RoutingRule

HANDOVER_S = 0.05
"""Kept back from a deadline, so that the answer in hand can still be delivered when the next model is too slow."""


@dataclass(frozen=True, slots=True)
class Route:
    """`models` in the order in which they may be asked; the second only when the answer of the first does not hold.
    `why` is for the record. `expect` is what the rule says of the answer."""

    models: tuple[str, ...]
    why: str
    expect: Literal["json", "tool_call"] | None = None


def class_names(routing: Routing, service: str | None) -> dict[str, RoutingRule]:
    """`desk/extract` for the rule of class extract: for clients that can set a model's name and no header."""
    return {} if service is None else {f"{service}/{rule.traffic_class}": rule for rule in routing.rules}


def choose_route(routing: Routing, service: str | None, asked: str | None, traffic_class: str | None) -> Route | None:
    """The service's own name, or none, is routed by class. A model's name pins it: it alone is asked, unchecked. So
    does the id that the model has elsewhere, where one model alone has it. None: nobody here has that name."""
    if asked is None or asked == service:
        rule = next((r for r in routing.rules if r.traffic_class == (traffic_class or DEFAULT_CLASS)), None)
        if rule is None:
            return Route(_chain(routing, routing.default), "default")
        return Route(_chain(routing, rule.model), f"class {rule.traffic_class}", rule.expect)
    named = [m.name for m in routing.models if m.name == asked] or [m.name for m in routing.models if m.ref.id == asked]
    return Route((named[0],), "named") if len(named) == 1 else None


def _chain(routing: Routing, first: str) -> tuple[str, ...]:
    escalation = routing.escalation
    if escalation is None or escalation.source != first:
        return (first,)
    return (first, *escalation.to)[: escalation.max_hops]


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask `model` next; `within_s` is how long it may take, None: as long as it wants."""

    model: str
    within_s: float | None


@dataclass(frozen=True, slots=True)
class Deliver:
    """Ask nobody any more. `missed` says why the next model was not asked although the answer failed; None: it held,
    or nobody is left."""

    missed: str | None = None


def next_step(route: Route, num_asked: int, failed: Sequence[str], left_s: float | None) -> Ask | Deliver:
    """After `num_asked` models, of which the last failed the checks `failed`. `left_s`: until the caller's deadline;
    None: there is none."""
    if not failed or num_asked >= len(route.models):
        return Deliver()
    if left_s is None:
        return Ask(route.models[num_asked], None)
    if left_s <= HANDOVER_S:
        return Deliver("deadline")
    return Ask(route.models[num_asked], left_s - HANDOVER_S)

"""Which model a request begins at, and who is asked after an answer that does not hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.contract.workload import Escalation, ModelRef, NamedModel, Routing, RoutingRule
from inferloop.fleet.decide.routes import HANDOVER_S, Ask, Deliver, Route, choose_route, next_step

MODELS = tuple(
    NamedModel(name, ModelRef(ref))
    for name, ref in (("cheap", "small"), ("middle", "large"), ("strong", "large"), ("spare", "other"))
)


def routing(max_hops: int = 3) -> Routing:
    rules = (RoutingRule("code", "strong"), RoutingRule("extract", "cheap", "json"))
    return Routing(MODELS, "cheap", rules, (), Escalation("cheap", ("middle", "strong"), max_hops, invalid_json=True))


@pytest.mark.parametrize(
    ("asked", "traffic_class", "route"),
    [
        (None, None, Route(("cheap", "middle", "strong"), "default")),
        ("desk", None, Route(("cheap", "middle", "strong"), "default")),
        ("desk", "unknown", Route(("cheap", "middle", "strong"), "default")),
        ("desk", "extract", Route(("cheap", "middle", "strong"), "class extract", "json")),
        ("desk", "code", Route(("strong",), "class code")),
        ("cheap", "extract", Route(("cheap",), "named")),
        ("spare", None, Route(("spare",), "named")),
        ("other", None, Route(("spare",), "named")),
        ("large", None, None),
        ("nobody", None, None),
        ("", None, None),
    ],
)
def test_the_service_is_routed_and_a_name_pins(asked: str | None, traffic_class: str | None, route: Route) -> None:
    assert choose_route(routing(), "desk", asked, traffic_class) == route


def test_a_rule_may_take_what_has_no_class() -> None:
    plain = Routing(MODELS, "cheap", (RoutingRule("default", "spare"),))
    assert choose_route(plain, "desk", "desk", None) == Route(("spare",), "class default")
    assert choose_route(plain, "desk", "desk", "code") == Route(("cheap",), "default")


def test_the_chain_ends_at_its_bound() -> None:
    route = choose_route(routing(max_hops=2), "desk", None, None)
    assert route is not None and route.models == ("cheap", "middle")


ROUTE = Route(("cheap", "middle", "strong"), "default")


@pytest.mark.parametrize(
    ("num_asked", "failed", "left_s", "step"),
    [
        (1, (), None, Deliver()),
        (1, ("invalid_json",), None, Ask("middle", None)),
        (2, ("invalid_json",), None, Ask("strong", None)),
        (3, ("invalid_json",), None, Deliver()),
        (1, ("invalid_json",), 10.0, Ask("middle", 10.0 - HANDOVER_S)),
        (1, ("invalid_json",), HANDOVER_S, Deliver("deadline")),
        (1, ("invalid_json",), -1.0, Deliver("deadline")),
        (3, ("invalid_json",), -1.0, Deliver()),
        (1, (), -1.0, Deliver()),
    ],
)
def test_the_next_is_asked_only_for_a_failure_and_within_the_deadline(
    num_asked: int, failed: tuple[str, ...], left_s: float | None, step: Ask | Deliver
) -> None:
    assert next_step(ROUTE, num_asked, failed, left_s) == step


@given(st.integers(2, 3), st.lists(st.booleans(), min_size=3, max_size=3), st.none() | st.floats(-1, 5))
def test_however_answers_fail_no_model_is_asked_twice_and_the_bound_holds(
    max_hops: int, fails: list[bool], left_s: float | None
) -> None:
    route = choose_route(routing(max_hops), "desk", None, None)
    assert route is not None
    asked, step = [route.models[0]], next_step(route, 1, ("x",) if fails[0] else (), left_s)
    while isinstance(step, Ask):
        asked.append(step.model)
        assert step.within_s is None or (left_s is not None and 0 < step.within_s < left_s)
        step = next_step(route, len(asked), ("x",) if fails[len(asked) - 1] else (), left_s)
    assert len(set(asked)) == len(asked) <= max_hops
    assert all(fails[: len(asked) - 1]), "nobody is asked after an answer that held"

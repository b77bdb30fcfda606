"""`models:` and `routing:` to values: several models behind one service, and which of them answers what."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from inferloop.contract.located import Located, kind_of
from inferloop.contract.model_ref import read_model, read_precision
from inferloop.contract.reader import Problems, Section, as_number, as_text, did_you_mean
from inferloop.contract.traffic import DEFAULT_CLASS, valid_name
from inferloop.contract.workload import Escalation, EvalTag, ModelRef, NamedModel, Price, Routing, RoutingRule

KEYS = ("default", "rules", "eval_tags", "escalation")
MODEL_KEYS = ("id", "precision", "usd_per_mtok", "replicas")
PRICE_KEYS = ("input", "cached_input", "output")
RULE_KEYS = ("class", "model", "expect")
TAG_KEYS = ("contains", "lacks", "regex")
ESCALATION_KEYS = ("from", "to", "on", "max_hops")
CHECKS = ("invalid_json", "refused_tool", "low_logprob", "eval_tag", "unavailable")
EXPECTATIONS = ("json", "tool_call")
MOST_MODELS = 16
MOST_REPLICAS = 256
_MOST_USD = 1e6


def read_routing(top: Section, service: str, class_names: Sequence[str], problems: Problems) -> Routing | None:
    """None when something needed is missing or wrong; the problems say what. `class_names` is the declared mix."""
    both = top.get("model")
    if both is not None:
        problems.add(both, "and models name what runs twice; keep one", "the default model is what is measured")
    models = _read_models(top.get("models", required=True), service, problems)
    section = top.section("routing", KEYS, required=True)
    if section is None:
        return None
    names = [m.name for m in models]
    if not names:
        return None
    default = section.text("default", choices=names, required=True)
    if default is not None and (given := _replicas_of(top, default)) is not None:
        problems.add(given, "is found out by measuring for the default model", "say it of the other models")
    tags = _read_tags(section.get("eval_tags"), problems)
    escalation = _read_escalation(section.section("escalation", ESCALATION_KEYS), names, tags, problems)
    rules = _read_rules(section.get("rules"), names, class_names, problems)
    return None if default is None else Routing(models, default, rules, tags, escalation)


def _read_models(node: Located | None, service: str, problems: Problems) -> tuple[NamedModel, ...]:
    if node is None:
        return ()
    if not isinstance(node.value, dict) or not node.value:
        problems.add(node, f"must be a mapping of names to models, not {kind_of(node)}", "cheap: {id: ..., ...}")
        return ()
    if len(node.value) > MOST_MODELS:
        problems.add(node, f"has {len(node.value)} models, and a service can have {MOST_MODELS}")
        return ()
    found = []
    for name, child in node.value.items():
        if not valid_name(name):
            problems.add(child, f"{name!r} must be letters, digits, dot, dash or underscore, at most 64")
        elif name == service:
            problems.add(child, "has the name of the service, by which requests ask to be routed", "name it otherwise")
        elif (model := _read_named(name, child, problems)) is not None:
            found.append(model)
    return tuple(found)


def _read_named(name: str, node: Located, problems: Problems) -> NamedModel | None:
    if not isinstance(node.value, dict):
        ref = read_model(node, problems)
        return None if ref is None else NamedModel(name, ref)
    section = Section(node, problems, MODEL_KEYS)
    model_id = section.text("id", required=True)
    precision = read_precision(section.get("precision"), problems)
    price = _read_price(section.get("usd_per_mtok"), problems)
    replicas = _whole(section.get("replicas"), problems, 1, MOST_REPLICAS)
    return None if model_id is None else NamedModel(name, ModelRef(model_id, precision), price, replicas or 1)


def _replicas_of(top: Section, name: str) -> Located | None:
    models = top.get("models")
    told: Any = models.value if models is not None else {}
    model = told[name].value
    return cast(Located | None, model.get("replicas")) if isinstance(model, dict) else None


def _whole(node: Located | None, problems: Problems, low: int, high: int) -> int | None:
    """None where nothing, or nothing of use, is given."""
    given = None if node is None else as_number(node, problems, low=low, high=high)
    if node is not None and given is not None and given != int(given):
        problems.add(node, f"must be a whole number, not {given:g}")
    return None if given is None else int(given)


def _read_price(node: Located | None, problems: Problems) -> Price | None:
    """One number for all tokens, or one for each kind; what the cache had costs what other input does, unless said."""
    if node is None:
        return None
    if not isinstance(node.value, dict):
        usd = as_number(node, problems, high=_MOST_USD)
        return None if usd is None else Price(usd, usd, usd)
    section = Section(node, problems, PRICE_KEYS)
    for key in ("input", "output"):
        section.get(key, required=True)
    usd_in, usd_cached, usd_out = (section.number(key, high=_MOST_USD) for key in PRICE_KEYS)
    if usd_in is None or usd_out is None:
        return None
    return Price(usd_in, usd_in if usd_cached is None else usd_cached, usd_out)


def _read_rules(
    node: Located | None, names: Sequence[str], class_names: Sequence[str], problems: Problems
) -> tuple[RoutingRule, ...]:
    if node is None:
        return ()
    if not isinstance(node.value, list):
        problems.add(node, f"must be a list of rules, not {kind_of(node)}", "[{class: code, model: strong}]")
        return ()
    mix = [name for name in class_names if name != DEFAULT_CLASS]
    found: dict[str, RoutingRule] = {}
    for item in node.value:
        section = Section(item, problems, RULE_KEYS)
        traffic_class = section.text("class", choices=mix, required=True)
        model = section.text("model", choices=names, required=True)
        expect = section.text("expect", choices=EXPECTATIONS)
        if traffic_class is None or model is None:
            continue
        if traffic_class in found:
            problems.add(item, f"is a second rule for the class {traffic_class}")
        found[traffic_class] = RoutingRule(traffic_class, model, cast(Any, expect))
    return tuple(found.values())


def _read_tags(node: Located | None, problems: Problems) -> tuple[EvalTag, ...]:
    if node is None:
        return ()
    if not isinstance(node.value, dict):
        problems.add(node, f"must be a mapping of names to checks, not {kind_of(node)}", "polite: {lacks: [...]}")
        return ()
    found = []
    for name, child in node.value.items():
        section = Section(child, problems, TAG_KEYS)
        contains, lacks = (_texts(section.get(key), problems) for key in ("contains", "lacks"))
        regex = section.text("regex")
        if not valid_name(name):
            problems.add(child, f"{name!r} must be letters, digits, dot, dash or underscore, at most 64")
        if isinstance(child.value, dict) and not (contains or lacks or regex):
            problems.add(child, "checks nothing", f"one of: {', '.join(TAG_KEYS)}")
        if regex is not None:
            try:
                re.compile(regex)
            except (re.error, OverflowError, RecursionError) as error:
                problems.add(section.get("regex") or child, f"is not a regular expression: {error}")
        found.append(EvalTag(name, contains, lacks, regex))
    return tuple(found)


def _read_escalation(
    section: Section | None, names: Sequence[str], tags: Sequence[EvalTag], problems: Problems
) -> Escalation | None:
    if section is None:
        return None
    source = section.text("from", choices=names, required=True)
    to = _texts(section.get("to", required=True), problems, names)
    if (on := section.get("on", required=True)) is None or source is None or not to:
        return None
    if source in to or len(set(to)) < len(to):
        problems.add(section.get("to") or section.node, "asks a model twice, which would answer alike")
    checks = _read_checks(on, [tag.name for tag in tags], problems)
    if "eval_tags" in checks:
        checks["eval_tags"] = tuple(dict.fromkeys(checks["eval_tags"]))
    max_hops = _whole(section.get("max_hops"), problems, 2, 1 + len(to)) or 1 + len(to)
    return Escalation(source, to, max_hops, **checks)


def _read_checks(node: Located, tags: Sequence[str], problems: Problems) -> dict[str, Any]:
    """`[invalid_json, low_logprob: -1.5]` to keyword arguments of Escalation."""
    items = node.value if isinstance(node.value, list) else [node]
    if not items:
        problems.add(node, "must name at least one check", f"valid: {', '.join(CHECKS)}")
    found: dict[str, Any] = {}
    for item in items:
        pairs = item.value.items() if isinstance(item.value, dict) else [(as_text(item, problems, CHECKS), None)]
        for name, value in pairs:
            if name is None:
                continue
            if name not in CHECKS:
                problems.add(value or item, f"{name!r} is not a check", did_you_mean(name, CHECKS))
            elif name == "low_logprob":
                found[name] = _threshold(item, value, problems)
            elif name == "eval_tag":
                found["eval_tags"] = (*found.get("eval_tags", ()), *_tag_names(item, value, tags, problems))
            elif value is not None:
                problems.add(value, "takes no value")
            else:
                found[name] = True
    return found


def _threshold(item: Located, value: Located | None, problems: Problems) -> float | None:
    if value is None:
        problems.add(item, "needs a threshold", "low_logprob: -1.5 (mean natural logarithm per token)")
        return None
    return as_number(value, problems, low=-1e4, high=0.0)


def _tag_names(item: Located, value: Located | None, tags: Sequence[str], problems: Problems) -> tuple[str, ...]:
    """Alone it means all of them."""
    if not tags:
        problems.add(item, "needs routing.eval_tags", "eval_tags: {polite: {lacks: [...]}}")
        return ()
    return tuple(tags) if value is None else _texts(value, problems, tags)


def _texts(node: Located | None, problems: Problems, choices: Sequence[str] = ()) -> tuple[str, ...]:
    """A text, or a list of them."""
    if node is None:
        return ()
    items = node.value if isinstance(node.value, list) else [node]
    if not items:
        problems.add(node, "must not be empty")
    return tuple(text for item in items if (text := as_text(item, problems, choices)) is not None)

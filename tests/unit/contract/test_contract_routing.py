"""`models:` and `routing:`: what they mean, what is refused with its place, and what deserves a word."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferloop.contract.describe import describe
from inferloop.contract.explain_routing import explain
from inferloop.contract.lint import lint
from inferloop.contract.load import load, parse
from inferloop.contract.routing import CHECKS, ESCALATION_KEYS, KEYS, MODEL_KEYS, PRICE_KEYS, RULE_KEYS, TAG_KEYS
from inferloop.contract.workload import (
    Contract,
    Escalation,
    EvalTag,
    ModelRef,
    NamedModel,
    Precision,
    Price,
    Routing,
    RoutingRule,
)
from inferloop.core.errors import ContractError, ContractProblemsError

TRAFFIC: dict[str, Any] = {"qps": 1, "input_tokens": {"p50": 30}, "output_tokens": {"p50": 8}}
TWO: dict[str, Any] = {
    "service": "desk",
    "traffic": TRAFFIC,
    "models": {
        "cheap": {"id": "small", "precision": "int8", "usd_per_mtok": {"input": 0.1, "output": 0.2}},
        "strong": {"id": "large", "usd_per_mtok": {"input": 1, "cached_input": 0.5, "output": 4}},
    },
    "routing": {
        "default": "cheap",
        "rules": [{"class": "extract", "model": "cheap", "expect": "json"}, {"class": "code", "model": "strong"}],
        "eval_tags": {"polite": {"lacks": "damn"}, "cites": {"contains": ["see"], "regex": r"\[\d+\]"}},
        "escalation": {
            "from": "cheap",
            "to": "strong",
            "on": ["invalid_json", "refused_tool", {"low_logprob": -1.5}, {"eval_tag": "polite"}],
        },
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """TWO with one value replaced; None removes it."""
    result = copy.deepcopy(TWO)
    *parents, last = path.split("/")
    node: Any = result
    for key in parents:
        node = node[key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return result


def test_every_key_has_its_meaning() -> None:
    contract = parse(TWO)
    assert contract.routing == Routing(
        models=(
            NamedModel("cheap", ModelRef("small", Precision(weights="int8")), Price(0.1, 0.1, 0.2)),
            NamedModel("strong", ModelRef("large"), Price(1, 0.5, 4)),
        ),
        default="cheap",
        rules=(RoutingRule("extract", "cheap", "json"), RoutingRule("code", "strong")),
        eval_tags=(EvalTag("polite", lacks=("damn",)), EvalTag("cites", ("see",), (), r"\[\d+\]")),
        escalation=Escalation(
            "cheap",
            ("strong",),
            max_hops=2,
            invalid_json=True,
            refused_tool=True,
            low_logprob=-1.5,
            eval_tags=("polite",),
        ),
    )
    assert contract.model == ModelRef("small", Precision(weights="int8")), "the default is what is measured"


def test_a_chain_may_be_longer_than_it_is_followed() -> None:
    contract = changed("models/giant", "huge-bf16")
    contract["routing"]["escalation"] |= {"to": ["strong", "giant"], "max_hops": 2, "on": "eval_tag"}
    routing = parse(contract).routing
    assert routing is not None and routing.escalation is not None
    assert (routing.escalation.to, routing.escalation.max_hops) == (("strong", "giant"), 2)
    assert routing.escalation.eval_tags == ("polite", "cites"), "alone it means all"
    assert routing.models[2] == NamedModel("giant", ModelRef("huge", Precision("bf16", "bf16", "bf16")))


def test_the_other_models_have_as_many_replicas_as_is_said() -> None:
    routing = parse(changed("models/strong/replicas", 3)).routing
    assert routing is not None and [m.replicas for m in routing.models] == [1, 3]
    assert "model strong: large" in (told := list(explain(routing))[1]) and told.endswith("; 3 replicas, not measured")


def test_a_description_loads_to_the_same_contract() -> None:
    contract = parse(changed("models/strong/replicas", 3))
    assert parse(describe(contract)) == contract and parse(describe(contract)).digest == contract.digest
    assert "model" not in describe(contract)


def test_routes_are_part_of_the_digest_and_one_model_means_what_it_did() -> None:
    assert parse(TWO).digest != parse(changed("routing/default", "strong")).digest
    single = parse({"service": "desk", "model": "small", "traffic": TRAFFIC})
    assert single.digest == "a9436c44aca561b984d646c19210dc84a94a1f9af526378486c077344120a465"


def test_cached_input_has_its_own_price() -> None:
    assert Price(1.0, 0.5, 4.0).usd(num_input=100, num_cached=40, num_output=10) == pytest.approx(120e-6)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("model", "small", "model: and models name what runs twice"),
        ("models", None, "models: is required"),
        ("routing", None, "routing: is required"),
        ("models", {}, "models: must be a mapping of names to models"),
        ("models/desk", {"id": "small"}, "models.desk: has the name of the service"),
        ("models/a b", {"id": "small"}, "must be letters, digits"),
        ("models/cheap/precison", "int8", "models.cheap.precison: is not a known key (did you mean precision?)"),
        ("models/cheap/usd_per_mtok", {"input": 1}, "models.cheap.usd_per_mtok.output: is required"),
        ("models/cheap/usd_per_mtok", -1, "must be at least 0"),
        ("models/cheap/replicas", 1, "models.cheap.replicas: is found out by measuring for the default model"),
        ("models/strong/replicas", 0, "models.strong.replicas: must be at least 1"),
        ("models/strong/replicas", 1.5, "must be a whole number, not 1.5"),
        ("models/strong/replicas", 1000, "must be at most 256"),
        ("routing/default", "cheep", "routing.default: 'cheep' is not known (did you mean cheap?"),
        ("routing/defualt", "cheap", "did you mean default?"),
        ("routing/rules", [{"class": "a", "model": "c", "expect": "yaml"}], "routing.rules[0].expect: 'yaml'"),
        ("routing/rules", [{"class": "a", "model": "cheap"}] * 2, "routing.rules[1]: is a second rule for the class a"),
        ("routing/eval_tags/polite", {}, "routing.eval_tags.polite: checks nothing"),
        ("routing/eval_tags/polite", {"regex": "("}, "routing.eval_tags.polite.regex: is not a regular expression"),
        ("routing/escalation/to", "cheap", "asks a model twice"),
        ("routing/escalation/on", [], "must name at least one check"),
        ("routing/escalation/on", ["low_logprob"], "needs a threshold"),
        ("routing/escalation/on", [{"low_logprob": 0.5}], "must be at most 0"),
        ("routing/escalation/on", ["invalid_jsn"], "did you mean invalid_json?"),
        ("routing/escalation/on", [{"invalid_jsn": 1}], "did you mean invalid_json?"),
        ("routing/escalation/on", [{"invalid_json": 1}], "takes no value"),
        ("routing/escalation/on", [{"eval_tag": "polit"}], "did you mean polite?"),
        ("routing/eval_tags", None, "needs routing.eval_tags"),
        ("routing/escalation/max_hops", 3, "must be at most 2"),
        ("routing/escalation/max_hops", 1, "must be at least 2"),
        ("traffic/classes", [{"name": "codes", "share": 1}], "routing.rules[1].class: 'code' is not known"),
    ],
)
def test_what_cannot_mean_anything_is_named_with_its_place(path: str, value: Any, says: str) -> None:
    with pytest.raises(ContractError) as caught:
        parse(changed(path, value))
    assert says in str(caught.value)


def test_yaml_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "desk.yaml"
    path.write_text(
        "traffic: {qps: 1, input_tokens: {p50: 30}, output_tokens: {p50: 8}}\n"
        "models: {cheap: small, strong: large}\n"
        "routing:\n"
        "  default: cheap\n"
        "  escalation: {from: cheap, to: strung, on: [invalid_json, low_logprob: -1]}\n"
        "rules: []\n"
    )
    with pytest.raises(ContractProblemsError) as caught:
        load(path)
    text = str(caught.value)
    assert f"{path}:5: routing.escalation.to: 'strung' is not known (did you mean strong?" in text
    assert f"{path}:6: rules: is not a known key here (it belongs under routing)" in text


def findings(contract: Contract) -> set[tuple[str, str]]:
    return {(f.rule, f.key) for f in lint(contract)}


@pytest.mark.parametrize(
    ("path", "value", "rule", "key"),
    [
        ("models/spare", "other", "model-unused", "models.spare"),
        ("models/cheap/usd_per_mtok", None, "no-price", "models"),
        ("models/cheap/usd_per_mtok", 9, "escalation-cheaper", "routing.escalation.to"),
        ("models/strong", {"id": "small", "precision": "int8"}, "escalation-same", "routing.escalation.to"),
        ("models/strong", {"id": "large-int7"}, "precision-in-name", "models.strong.precision"),
        ("routing/escalation/on", ["refused_tool"], "expect-unchecked", "routing.rules[0].expect"),
    ],
)
def test_what_is_weak_is_pointed_out(path: str, value: Any, rule: str, key: str) -> None:
    assert (rule, key) not in findings(parse(TWO))
    assert (rule, key) in findings(parse(changed(path, value)))


names = st.sampled_from(["cheap", "strong", "desk", "no"])
scalars = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | names | st.sampled_from(["polite", "json", "("])
)
keys = st.sampled_from([*KEYS, *MODEL_KEYS, *PRICE_KEYS, *RULE_KEYS, *TAG_KEYS, *ESCALATION_KEYS, *CHECKS]) | names
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5), max_leaves=12
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["models/cheap", "routing", *(f"routing/{key}" for key in KEYS), "models"]), anything)
def test_nonsense_is_a_typed_error_and_sense_survives_its_description(path: str, value: Any) -> None:
    try:
        contract = parse(changed(path, value))
    except ContractError as error:
        assert str(error).startswith("contract: ")
    else:
        assert parse(json.loads(json.dumps(describe(contract)))) == contract
        lint(contract)
        assert contract.routing is None or list(explain(contract.routing))


def test_an_escalation_that_nothing_reaches_is_pointed_out() -> None:
    contract = changed("routing/default", "strong")
    contract["routing"]["rules"] = []
    assert ("escalation-unreached", "routing.escalation.from") in findings(parse(contract))


def test_people_can_read_the_routes() -> None:
    routing = parse(TWO).routing
    assert routing is not None
    assert list(explain(routing)) == [
        "model cheap: small, weights int8, USD per million tokens: 0.1 in, 0.1 cached, 0.2 out; "
        "as many replicas as measuring tells",
        "model strong: large, as stored, USD per million tokens: 1 in, 0.5 cached, 4 out; 1 replica, not measured",
        "route class extract -> cheap, answers must be JSON",
        "route class code -> strong",
        "route everything else -> cheap",
        "escalate cheap -> strong on invalid_json, refused_tool, low_logprob below -1.5, eval_tag polite; "
        "at most 2 models are asked",
    ]

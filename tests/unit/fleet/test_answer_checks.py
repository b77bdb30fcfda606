"""Does an answer hold? Each check on what it looks at, and on what it must leave alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.contract.workload import Escalation, EvalTag, ModelRef, NamedModel, Routing
from inferloop.fleet.decide.answer_checks import (
    AnswerSummary,
    ChoiceSummary,
    ToolCall,
    Wants,
    failed_checks,
    is_json,
    may_fail,
)

TAGS = (EvalTag("polite", lacks=("damn",)), EvalTag("cites", contains=("see",), regex=r"\[\d+\]"))


def routing(**checks: Any) -> Routing:
    models = (NamedModel("cheap", ModelRef("small")), NamedModel("strong", ModelRef("large")))
    return Routing(models, "cheap", (), TAGS, Escalation("cheap", ("strong",), 2, **checks))


def judged(wants: Wants, *choices: ChoiceSummary, **checks: Any) -> tuple[str, ...]:
    return failed_checks(routing(**checks), wants, AnswerSummary(choices))


def calls(*pairs: tuple[str, str]) -> ChoiceSummary:
    return ChoiceSummary("", tuple(ToolCall(name, arguments) for name, arguments in pairs))


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a": 1}', True),
        (" [1, 2]\n", True),
        ("7", True),
        ("", False),
        ('{"a": 1', False),
        ('{"a": 1} and more', False),
        ('```json\n{"a": 1}\n```', False),
        ("NaN", False),
        ("{'a': 1}", False),
        ('"\ud800"', False),
        ("[" * 100_000, False),
    ],
)
def test_json_is_what_a_strict_parser_takes(text: str, valid: bool) -> None:
    assert is_json(text) is valid


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), st.lists, max_leaves=8))
def test_whatever_was_written_as_json_is_json_and_its_beginnings_are_not(value: Any) -> None:
    text = json.dumps({"value": value})
    assert is_json(text, must_be_object=True) and not is_json(json.dumps([value]), must_be_object=True)
    assert not any(is_json(text[:end]) for end in range(len(text)))


@given(st.text(max_size=40) | st.text(alphabet='{}[]":,\\0e+-.truefalsn ', max_size=40))
def test_the_two_parsers_agree(text: str) -> None:
    def strict(constant: str) -> float:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=strict)
        valid = True
    except ValueError:
        valid = False
    if "\\u" not in text and "\\0" not in text:  # halves of characters, which Python's parser lets through
        assert is_json(text) is valid


def test_json_is_checked_only_where_it_was_asked_for() -> None:
    broken = ChoiceSummary("{")
    assert judged(Wants(json=True), broken, invalid_json=True) == ("invalid_json",)
    assert judged(Wants(), broken, invalid_json=True) == ()
    assert judged(Wants(json=True), broken) == ()
    assert judged(Wants(json=True, json_object=True), ChoiceSummary("[]"), invalid_json=True) == ("invalid_json",)
    assert judged(Wants(json=True), calls(("f", "{}")), invalid_json=True) == (), "calls come in place of the JSON"


WHOLE = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'


def test_json_of_another_shape_than_the_schemas_is_not_what_was_asked_for() -> None:
    wants = Wants(json=True, schema=WHOLE)
    verdicts = {
        text: judged(wants, ChoiceSummary(text), invalid_json=True) for text in ('{"n": 1}', '{"n": "1"}', "{}")
    }
    assert list(verdicts.values()) == [(), ("invalid_json",), ("invalid_json",)]
    assert judged(Wants(json=True, schema='{"type": "whole"}'), ChoiceSummary("{}"), invalid_json=True) == ()
    assert judged(replace(wants, json_object=True), ChoiceSummary("[]"), invalid_json=True) == ("invalid_json",)


@pytest.mark.parametrize(
    ("wants", "choice", "refused"),
    [
        (Wants(tool_call=True), ChoiceSummary("I cannot."), True),
        (Wants(tool_call=True, offered={"f": None}), calls(("f", "{}")), False),
        (Wants(tool_call=True, tool="f", offered={"f": None, "g": None}), calls(("g", "{}")), True),
        (Wants(tool_call=True, tool="f", offered={"f": None, "g": None}), calls(("g", "{}"), ("f", "{}")), False),
        (Wants(offered={"f": None}), ChoiceSummary("No tool is needed."), False),
        (Wants(offered={"f": None}), calls(("h", "{}")), True),
        (Wants(offered={"f": None}), calls(("f", '{"a": ')), True),
        (Wants(offered={"f": None}), calls(("f", "[1]")), True),
        (Wants(offered={"f": WHOLE, "g": None}), calls(("f", '{"n": 1}'), ("g", '{"n": "x"}')), False),
        (Wants(offered={"f": WHOLE, "g": None}), calls(("g", "{}"), ("f", "{}")), True),
        (Wants(), ChoiceSummary("words"), False),
    ],
)
def test_a_tool_is_refused_by_not_calling_it_or_by_a_call_that_cannot_be_made(
    wants: Wants, choice: ChoiceSummary, refused: bool
) -> None:
    assert judged(wants, choice, refused_tool=True) == (("refused_tool",) if refused else ())
    assert judged(wants, choice) == ()


def test_unsure_is_below_the_threshold_and_what_was_not_told_is_not_unsure() -> None:
    for mean, failed in ((-1.6, ("low_logprob",)), (-1.5, ()), (0.0, ()), (None, ())):
        assert judged(Wants(), ChoiceSummary("x", mean_logprob=mean), low_logprob=-1.5) == failed


def test_tags_fail_by_name_and_judge_texts_alone() -> None:
    both = ("polite", "cites")
    assert judged(Wants(), ChoiceSummary("see [1]"), eval_tags=both) == ()
    assert judged(Wants(), ChoiceSummary("damn, see"), eval_tags=both) == ("eval_tag:polite", "eval_tag:cites")
    assert judged(Wants(), ChoiceSummary("damn, see"), eval_tags=("polite",)) == ("eval_tag:polite",)
    assert judged(Wants(), calls(("f", "{}")), eval_tags=both) == ()


def test_one_bad_choice_is_enough_and_each_check_is_named_once() -> None:
    answers = [ChoiceSummary("{}"), ChoiceSummary("{"), ChoiceSummary("damn")]
    checks: dict[str, Any] = {"invalid_json": True, "eval_tags": ("polite",)}
    assert judged(Wants(json=True), *answers, **checks) == ("invalid_json", "eval_tag:polite")


@pytest.mark.parametrize(
    ("checks", "wants", "held"),
    [
        ({"invalid_json": True}, Wants(), False),
        ({"invalid_json": True}, Wants(json=True), True),
        ({"refused_tool": True}, Wants(json=True), False),
        ({"refused_tool": True}, Wants(offered={"f": None}), True),
        ({"refused_tool": True}, Wants(tool_call=True), True),
        ({"low_logprob": -1.0}, Wants(), True),
        ({"eval_tags": ("polite",)}, Wants(), True),
        ({"unavailable": True}, Wants(json=True), False),
    ],
)
def test_only_what_a_check_can_look_at_is_held_back(checks: dict[str, Any], wants: Wants, held: bool) -> None:
    assert may_fail(routing(**checks), wants) is held
    assert not may_fail(Routing(routing().models, "cheap"), wants)

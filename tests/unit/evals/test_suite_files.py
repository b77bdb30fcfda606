"""Suite files: what loads, and what a wrong one is told."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from inferloop.core.errors import ContractError, UsageError
from inferloop.evals.load import load_suite, parse_suite

GOOD = """
suite: small
version: 1
defaults: {max_tokens: 8}
cases:
  - id: rome
    kind: contains
    why: geography is what this assistant is for
    messages: [{role: user, content: "Capital of Italy?"}]
    expect: Rome
    tags: [golden]
  - id: stops
    kind: protocol
    why: a leaked stop string breaks callers that split on it
    prompt: "1, 2, 3,"
    sampling: {stop: [" 5"]}
    expect: {finish_reason: stop, lacks: [" 5"]}
"""


def test_a_suite_loads_with_its_defaults() -> None:
    suite = parse_suite(GOOD)
    rome, stops = suite.cases
    assert (suite.name, suite.version, len(suite.cases)) == ("small", 1, 2)
    assert rome.expect == ("Rome",) and rome.tags == ("golden",)
    assert rome.body == {
        "messages": [{"role": "user", "content": "Capital of Italy?"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    assert rome.endpoint == "/v1/chat/completions" and stops.endpoint == "/v1/completions"
    assert stops.body["stop"] == [" 5"] and stops.body["max_tokens"] == 8


def test_a_request_override_may_remove_a_field() -> None:
    text = GOOD.replace(
        "    sampling: {stop:", "    request: {temperature: -1, max_tokens: null}\n    sampling: {stop:"
    )
    body = parse_suite(text).cases[1].body
    assert body["temperature"] == -1 and "max_tokens" not in body


def test_digests_follow_what_decides_the_score_alone() -> None:
    suite = parse_suite(GOOD)
    case = suite.cases[0]
    assert replace(case, why="other words", tags=()).digest == case.digest
    assert replace(case, expect=("Paris",)).digest != case.digest
    assert replace(suite, source="elsewhere").digest == suite.digest
    assert replace(suite, cases=suite.cases[::-1]).digest != suite.digest


@pytest.mark.parametrize(
    ("old", "new", "where", "said"),
    [
        ("kind: contains", "kind: containz", ":7: cases[0].kind", "did you mean contains"),
        ("why: geography", "wy: geography", ":8: cases[0].wy", "did you mean why"),
        ("    expect: Rome\n", "", ":6: cases[0].expect", "is missing"),
        ("id: stops", "id: rome", ":12: cases[1].id", "already the id of the case on line 6"),
        ("stop: [", "stopp: [", ":16: cases[1].sampling.stopp", "did you mean stop"),
        ("{max_tokens: 8}", "{max_tokens: 0}", ":4: defaults.max_tokens", "whole number >= 1"),
        ("{max_tokens: 8}", "{temperature: .nan}", ":4: defaults.temperature", "from 0 to 2"),
        ("finish_reason: stop", "finish_reasn: stop", ":17: cases[1].expect.finish_reasn", "did you mean"),
        ("{finish_reason: stop, lacks: [\" 5\"]}", "{}", ":17: cases[1].expect", "could not fail"),
        ("    prompt: \"1, 2, 3,\"\n", "", ":12: cases[1]", "either messages or prompt"),
        ("version: 1", "version: 2", ":3: version", "the only version"),
        ("    kind: contains\n", "    kind: contains\n    kind: exact\n", ":8: cases[0].kind", "given twice"),
        ("role: user", "role: usr", ":9: cases[0].messages[0].role", "did you mean user"),
        ("content: \"Capital of Italy?\"", "content: {a: 1, a: 2}", ":9: cases[0].messages[0].content.a", "twice"),
        ("cases:\n", "cases: 3\nother:\n", ":6: other", "not a known key"),
    ],
)  # fmt: skip
def test_a_wrong_suite_is_told_file_line_key_and_the_nearest_name(old: str, new: str, where: str, said: str) -> None:
    assert GOOD.count(old) == 1, "the fixture changed"
    with pytest.raises(ContractError) as caught:
        parse_suite(GOOD.replace(old, new), source="s.yaml")
    assert str(caught.value).startswith(f"s.yaml{where}"), str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "a: [1", "- 1\n", "suite: x\nversion: 1\ncases: []\n", "\x00"])
def test_no_text_gets_past_with_another_error(text: str) -> None:
    with pytest.raises(ContractError, match="suite"):
        parse_suite(text)


@pytest.mark.parametrize(
    ("kind", "expect", "said"),
    [
        ("regex", "'('", "not a regular expression"),
        ("template", "[1, -2]", "token ids"),
        ("template", "[true]", "token ids"),
        ("exact", "12", "the whole answer as text"),
        ("contains", "[]", "a text or a list of texts"),
        ("json", "[.nan]", "must be a JSON value"),
    ],
)
def test_an_expectation_must_fit_its_kind(kind: str, expect: str, said: str) -> None:
    text = f"""
        suite: s
        version: 1
        cases:
          - {{id: a, kind: {kind}, why: w, messages: [{{role: user, content: x}}], expect: {expect}}}
    """
    with pytest.raises(ContractError, match=said):
        parse_suite(textwrap.dedent(text))


def test_toml_and_json_mean_the_same() -> None:
    plain = yaml.safe_load(GOOD)
    toml = """
        suite = "small"
        version = 1
        defaults = {max_tokens = 8}
        [[cases]]
        id = "rome"
        kind = "contains"
        why = "other words"
        messages = [{role = "user", content = "Capital of Italy?"}]
        expect = "Rome"
        [[cases]]
        id = "stops"
        kind = "protocol"
        why = "w"
        prompt = "1, 2, 3,"
        sampling = {stop = [" 5"]}
        expect = {finish_reason = "stop", lacks = [" 5"]}
    """
    digest = parse_suite(GOOD).digest
    assert parse_suite(json.dumps(plain), fmt="json").digest == digest
    assert parse_suite(toml, fmt="toml").digest == digest


def test_a_missing_and_a_binary_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.yaml does not exist"):
        load_suite(tmp_path / "absent.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ContractError, match=r"b\.yaml:1: is not UTF-8"):
        load_suite(tmp_path / "b.yaml")

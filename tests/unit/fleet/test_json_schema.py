"""Schemas of strangers: what they say is checked, what they would do is not done."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferloop.fleet.decide.json_schema import MAX_SCHEMA_CHARS, fits

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0},
        "role": {"$ref": "#/$defs/role"},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"role": {"enum": ["guest", "host"]}},
}


def doubling(depth: int, leaf: Any) -> dict[str, Any]:
    """A few lines that demand 2 ** depth steps."""
    defs: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{depth}": leaf}}


def nested(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"not": value}
    return value


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ({"name": "Ann", "age": 3, "role": "host"}, PERSON, True),
        ({"age": 3}, PERSON, False),
        ({"name": "ann"}, PERSON, False),
        ({"name": "Ann", "age": -1}, PERSON, False),
        ({"name": "Ann", "age": True}, PERSON, False),
        ({"name": "Ann", "role": "owner"}, PERSON, False),
        ({"name": "Ann", "more": 1}, PERSON, False),
        ([], PERSON, False),
        (1, False, False),
        ([1, 1], {"uniqueItems": True}, False),
        (5, {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 5, "exclusiveMaximum": True}, False),
        (["a"], {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}]}, False),
        ({"next": {"next": 1}}, {"type": "object", "properties": {"next": {"$ref": "#"}}}, False),
        ("b", doubling(9, {"type": "integer"}), False),
    ],
)
def test_what_a_schema_says(value: Any, schema: Any, expected: bool) -> None:
    assert fits(value, json.dumps(schema)) is expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"},
        {"required": "name"},
        {"properties": []},
        {"$schema": "https://example.org/mine", "type": "string"},
        {"$schema": {}, "type": "string"},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"$dynamicRef": "#x", "$dynamicAnchor": "x"},
        {"pattern": "(?=a)b"},
        {"pattern": "("},
        {"patternProperties": {"^(a+)+$": False}},
        {"unevaluatedProperties": False},
        [],
        "string",
        nested(900),
        doubling(40, {"type": ["integer", "string", "object"]}),
        {"type": "string", "description": "x" * MAX_SCHEMA_CHARS},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_what_cannot_be_checked_fails_nobody(schema: Any) -> None:
    assert all(fits(value, json.dumps(schema)) for value in (7, "b", {"a": 1}))


@pytest.mark.parametrize("text", ["", "{", "NaN", "[" * 50_000])
def test_what_is_no_json_is_no_schema(text: str) -> None:
    assert fits(7, text)


def test_nothing_is_fetched(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "string"}')
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        for where in (f"http://127.0.0.1:{server.getsockname()[1]}/x", path.as_uri(), str(path)):
            for schema in ({"$ref": where}, {"$id": where, "$ref": "other"}, {"$schema": where}):
                assert fits(7, json.dumps(schema))
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("a" * 5000 + "b", {"pattern": "^(a+)+$"}, False),
        ({"a": "a" * 5000 + "b"}, {"additionalProperties": {"pattern": "(a|a)*$^"}}, False),
        ([{"a": i} for i in range(5000)], {"uniqueItems": True}, True),
        ([7] * 5000, {"items": {"enum": list(range(8000))}}, True),
    ],
)
def test_what_would_take_for_ever_is_cut_off(value: Any, schema: Any, expected: bool) -> None:
    """Each of them takes minutes without the bound, and longer than anybody lives with some more letters."""
    assert fits(value, json.dumps(schema)) is expected


scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=3)
NAMES = "$ref $id $defs type properties items required allOf anyOf not enum const pattern minimum uniqueItems if"
words = st.sampled_from(NAMES.split())
anything = st.recursive(
    scalars | st.sampled_from(["#", "#/$defs/a", "object", "^(a+)+$"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(anything, anything)
def test_any_schema_at_all_gets_a_verdict(value: Any, schema: Any) -> None:
    assert fits(value, json.dumps(schema)) in (True, False)

"""Calls in answers: what counts as one, what stays text, and that cuts change nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.engine.text.depth import MAX_DEPTH
from inferloop.engine.text.tools.calls import ToolCall
from inferloop.engine.text.tools.dialects import DIALECTS, taught_dialect
from inferloop.engine.text.tools.parser import Event, ToolParser

NAMES = ("now", "get_weather", "f-1")


def parse(dialect: str, pieces: Sequence[str], max_calls: int | None = None) -> list[Event]:
    """Events with neighbouring texts joined."""
    parser = ToolParser(DIALECTS[dialect], NAMES, max_calls=max_calls)
    joined: list[Event] = []
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
        if joined and isinstance(event, str) and isinstance(joined[-1], str):
            joined[-1] += event
        else:
            joined.append(event)
    return joined


def call(name: str, arguments: object) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


NOW, OSLO = call("now", {}), call("get_weather", {"city": "Oslo"})

CASES: list[tuple[str, str, list[Event]]] = [
    ("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"name":"now","arguments":null}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"name":"now","arguments":""}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"name":"now"}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"arguments": "{\\"city\\": \\"Oslo\\"}", "name": "get_weather"}</tool_call>', [OSLO]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "parameters": {"city": "Oslo"}}', [OSLO]),  # not closed
    (
        "hermes",
        'One moment.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n',
        ["One moment.", NOW, OSLO],
    ),
    ("hermes", '<tool_call>{"name":"now"}\n</tool_c', [NOW]),  # cut where it closes
    ("hermes", '<tool_call>{"name":"now"}</tool_call>\nDone.\n', [NOW, "\nDone.\n"]),
    (
        "hermes",
        '<tool_call>{"name":"get_weather","arguments":{"city":"</tool_call> {\\" 🌍"}}</tool_call>',
        [call("get_weather", {"city": '</tool_call> {" 🌍'})],
    ),
    ("hermes", '<tool_call>{"name":"f-1","arguments":{"x":"a\nb"}}</tool_call>', [call("f-1", {"x": "a\nb"})]),
    ("hermes", '<tool_call>{"name":"now"<tool_call>{"name":"now"}', ['<tool_call>{"name":"now"', NOW]),
    ("llama3_json", '{"name": "now", "parameters": {}}', [NOW]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": null}', [NOW]),
    (
        "llama3_json",
        '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Oslo"}}',
        [NOW, OSLO],
    ),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', [NOW]),
    ("llama3_json", 'Sure: {"name": "now", "arguments": {}} ok', ["Sure:", NOW, " ok"]),
    ("pythonic", "[now()]", [NOW]),
    ("pythonic", "[now(), get_weather(city='Oslo')]", [NOW, OSLO]),
    (
        "pythonic",
        'Let me. [f-1(a=-1.5, b=[True, None, (1,)], c={"k": "\\u00e9\\n]"}, d=false,)]\n',
        ["Let me.", call("f-1", {"a": -1.5, "b": [True, None, [1]], "c": {"k": "é\n]"}, "d": False})],
    ),
    ("pythonic", '[f-1(a="\\ud83d\\ude00 \\q")]', [call("f-1", {"a": "😀 \\q"})]),
]
TEXTS = [
    ("hermes", "plain < text </tool_call> with <tool tags> \n"),
    ("hermes", '<tool_call>{"name":"now","argum'),  # cut
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>now()</tool_call>"),
    ("hermes", '<tool_call>{"name":"other","arguments":{}}</tool_call>'),  # not offered
    ("hermes", '<tool_call>{"name":7}</tool_call>'),
    ("hermes", '<tool_call>{"name":"now","arguments":[1]}</tool_call>'),
    ("hermes", '<tool_call>{"name":"now","arguments":{"x":1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"now","arguments":{"x":NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"now",}</tool_call>'),
    ("hermes", '<tool_call>{"name":"now","arguments":{]}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"now","arguments":' + '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH + "}</tool_call>"),
    ("hermes", '<tool_call>{"name":"now","arguments":{"x":' + "9" * 5000 + "}}</tool_call>"),
    ("hermes", " \n"),
    ("llama3_json", 'function f() { return {}; } {"name": "Bob", "parameters": {}}; {'),
    ("llama3_json", '{"name": "now", "other": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", '{"a": {"name": "now", "parameters": {}}}'),
    ("pythonic", "[text](link) [now] [now(] [nowhere()] [now(1)] [now(a=b)] [now(a=1, a=2)] [now(), other()]"),
    ("pythonic", "[now(a=__import__('os'))]"),
    ("pythonic", "[now(a='x)]"),
    ("pythonic", "[now("),
    ("pythonic", "[now(a='\\U00110000')]"),
]
ALL = [*CASES, *((dialect, text, [text]) for dialect, text in TEXTS)]


@pytest.mark.parametrize(("dialect", "text", "expected"), ALL)
def test_what_is_a_call_and_what_is_text(dialect: str, text: str, expected: list[Event]) -> None:
    assert parse(dialect, [text]) == expected


@pytest.mark.parametrize(("dialect", "text", "expected"), ALL)
def test_cuts_change_nothing(dialect: str, text: str, expected: list[Event]) -> None:
    assert parse(dialect, list(text)) == expected
    if len(text) < 1000:
        for i in range(len(text) + 1):
            assert parse(dialect, [text[:i], text[i:]]) == expected


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data())
def test_any_text_in_any_pieces(dialect: str, data: st.DataObject) -> None:
    """Pieces of calls and of anything else, in any order and cut anywhere; without a call no character is lost."""
    words = [text[a : a + 12] for d, text, _ in CASES if d == dialect for a in range(0, len(text), 12)]
    parts = data.draw(st.lists(st.one_of(st.sampled_from(words), st.text(max_size=5)), max_size=12))
    text = "".join(parts)
    whole = parse(dialect, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert parse(dialect, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    if all(isinstance(event, str) for event in whole):
        assert "".join(map(str, whole)) == text


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), VALUES, max_size=4)


@pytest.mark.parametrize("dialect", DIALECTS)
@given(asked=st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3))
def test_what_is_written_is_read_back(dialect: str, asked: list[tuple[str, dict[str, object]]]) -> None:
    found = parse(dialect, list(DIALECTS[dialect].write(asked)))
    assert [(c.name, json.loads(c.arguments)) for c in found if isinstance(c, ToolCall)] == asked
    assert all(isinstance(event, ToolCall) for event in found)


def test_text_is_held_back_only_while_it_may_become_a_call() -> None:
    parser = ToolParser(DIALECTS["hermes"], NAMES)
    assert parser.push("Hello <tool") == ["Hello"]
    assert parser.push("s>") == [" <tools>"]
    assert parser.push('<tool_call>{"name":"now"') == []
    assert parser.push("}") == [NOW]


def test_calls_beyond_the_most_are_dropped() -> None:
    text = '<tool_call>{"name":"now"}</tool_call>\n' * 3 + "x"
    assert parse("hermes", [text], max_calls=1) == [NOW, "\nx"]


def test_halves_of_characters_are_sent_as_escapes() -> None:
    (found,) = parse("hermes", ['<tool_call>{"name":"now","arguments":{"x":"\\ud800"}}</tool_call>'])
    assert found == ToolCall("now", '{"x": "\\ud800"}')


def test_long_hostile_text_is_read_in_linear_time() -> None:
    """Quadratic work would take minutes here."""
    for dialect, unit in (("hermes", '<tool_call>{"'), ("llama3_json", '{"a":['), ("pythonic", "[now(a=[")):
        text = unit * 20_000
        assert parse(dialect, [text]) == [text]


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("{% if tools %}<tools></tools><tool_call>\n{\"name\": <function-name>}\n</tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call>\n<function=example>{% endif %}", None),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name}', "llama3_json"),
        ("return [func_name1(params_name1=params_value1, ...), func_name2(params)]", "pythonic"),
        ("[AVAILABLE_TOOLS] {{ tools }} [TOOL_CALLS]", None),
        ("{{ tools | tojson }}", None),
    ],
)  # fmt: skip
def test_the_template_tells_the_dialect(template: str, dialect: str | None) -> None:
    assert taught_dialect(template) == dialect

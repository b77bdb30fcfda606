"""Reasoning told apart from the answer, however both are cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.engine.text.answer import AnswerPlan, AnswerReader
from inferloop.engine.text.reasoning import ThinkParser
from inferloop.engine.text.tools.calls import ToolCall


def parse(pieces: Sequence[str], *, opened: bool) -> tuple[str, str]:
    parser = ThinkParser(opened=opened)
    parts = [*(parser.push(piece) for piece in pieces), parser.finish()]
    return "".join(r for r, _ in parts), "".join(a for _, a in parts)


CASES = [
    ("<think>\nHm.\n</think>\n\nYes.", False, ("Hm.", "Yes.")),
    ("\n <think>a\n\nb</think>c </think> d\n", False, ("a\n\nb", "c </think> d\n")),
    ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
    ("Yes. <think>no</think>", False, ("", "Yes. <think>no</think>")),
    (" \n<thin", False, ("", " \n<thin")),
    (" \n", False, ("", " \n")),
    ("<think>cut </thi", False, ("cut </thi", "")),
    ("<think>cut \n", False, ("cut", "")),
    ("Hm.\n</think>\nYes.", True, ("Hm.", "Yes.")),
    ("\n<think>Hm.</think>Yes.", True, ("Hm.", "Yes.")),
    ("</think>Yes.", True, ("", "Yes.")),
    ("<th", True, ("<th", "")),
    ("a < b </think", True, ("a < b </think", "")),
    ("", True, ("", "")),
]


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_both_parts_at_every_cut(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert parse([text], opened=opened) == expected
    assert parse(list(text), opened=opened) == expected
    for i in range(len(text) + 1):
        assert parse([text[:i], text[i:]], opened=opened) == expected


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "thi", " ", "\n", "é", "nk>"]), max_size=10),
    opened=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_any_text_in_any_pieces(parts: list[str], opened: bool, cuts: list[int]) -> None:
    text = "".join(parts)
    edges = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert parse(pieces, opened=opened) == parse([text], opened=opened)


def test_calls_are_looked_for_in_the_answer_only() -> None:
    call = '<tool_call>{"name":"f"}</tool_call>'
    plan = AnswerPlan(tool_dialect="hermes", tool_names=("f",), thinks=True)
    reader = AnswerReader(plan)
    parts = [reader.push(f"<think>I may {call}</think>\nOk.\n{call}"), reader.finish()]
    assert [p.reasoning for p in parts] == [f"I may {call}", ""]
    assert [e for p in parts for e in p.events] == ["Ok.", ToolCall("f", "{}")]


def test_what_is_not_asked_for_stays_text() -> None:
    reader, text = AnswerReader(AnswerPlan()), '<think>a</think><tool_call>{"name":"f"}'
    parts = reader.push(text)
    assert (parts.text, parts.calls, parts.reasoning, reader.finish().text) == (text, [], "", "")

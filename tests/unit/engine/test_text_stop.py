"""Stop strings: the classes of fault that streams are known for."""

from __future__ import annotations

import pytest

from inferloop.core.errors import RequestError
from inferloop.engine.text.stop import StopMatcher


def test_a_stop_over_several_pieces_never_leaks() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.push("ABCDE") == ("ABC", None)
    assert matcher.push("FGH") == ("", None)
    assert matcher.push("IJK") == ("", "DEFGHIJ")
    assert matcher.flush() == ""


def test_a_stop_inside_one_piece_is_seen() -> None:
    assert StopMatcher(["DE"]).push("ABCDEFG") == ("ABC", "DE")


def test_a_broken_off_stop_is_shown_as_soon_as_it_cannot_match() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("hi\n") == ("hi", None)
    assert matcher.push("\nU") == ("", None)
    assert matcher.push("nder") == ("\n\nUnder", None)


def test_what_is_held_at_the_end_is_flushed_once() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("xST") == ("x", None)
    assert matcher.flush() == "ST"
    assert matcher.flush() == ""


def test_the_stop_complete_first_wins_and_of_equals_the_longest() -> None:
    assert StopMatcher(["abcd", "bc"]).push("abcd") == ("a", "bc")
    assert StopMatcher(["c", "bc"]).push("abcd") == ("a", "bc")


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b.c") == ("a", ".")
    assert matcher.push("more") == ("", ".")
    assert matcher.flush() == ""


def test_without_stops_text_passes_through() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.flush() == ""


def test_an_empty_stop_is_the_callers_mistake() -> None:
    with pytest.raises(RequestError) as caught:
        StopMatcher(["ok", ""])
    assert caught.value.param == "stop"

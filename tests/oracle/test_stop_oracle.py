"""The stop matcher against a slow, obvious one that looks at the whole text after every character."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inferloop.engine.text.stop import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4)


def truth(text: str, stops: list[str]) -> tuple[str, str | None]:
    """(text before the stop that is complete first, that stop)."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stops if text[:end].endswith(s)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def longest_open_prefix(text: str, stops: list[str]) -> int:
    lengths = [k for s in stops for k in range(len(s)) if text.endswith(s[:k])]
    return max(lengths)


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None, str]:
    matcher, shown, matched = StopMatcher(stops), [], None
    for piece in pieces:
        emit, matched = matcher.push(piece)
        shown.append(emit)
    return shown, matched, matcher.flush()


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
@settings(max_examples=500, deadline=None)
def test_same_text_and_same_stop_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    shown, matched, rest = run(pieces, stops)
    assert ("".join(shown) + rest, matched) == truth("".join(pieces), stops)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
@settings(max_examples=500, deadline=None)
def test_holds_back_exactly_the_longest_suffix_that_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher, seen, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        seen += piece
        emit, matched = matcher.push(piece)
        shown += emit
        if matched is not None:
            break
        assert len(seen) - len(shown) == longest_open_prefix(seen, stops)

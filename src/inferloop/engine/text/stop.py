"""Stop strings in a stream, however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

from inferloop.core.errors import RequestError


class StopMatcher:
    """Finds the stop string that is complete first (of those complete at the same character, the longest).

    Only the longest suffix that may still become a stop is held back, and no character of the matched stop is ever
    emitted. Knuth-Morris-Pratt, one state per stop, so the work per character does not depend on what came before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises RequestError naming `stop` for an empty string."""
        if not all(stops):
            raise RequestError("a stop string must not be empty", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self.has_stops = bool(self._stops)
        self._failures = [_failures(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown now, the stop that matched). After a match nothing more is emitted."""
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        start = len(self._held)
        pending = self._held + text
        for end, char in enumerate(text, start + 1):
            found = self._advance(char)
            if found is not None:
                self.matched, self._held = found, ""
                return pending[: end - len(found)], found
        keep = max(self._states)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """What was held back and did not become a stop. Call once, at the end of an answer without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for i, stop in enumerate(self._stops):
            state, failures = self._states[i], self._failures[i]
            while state and stop[state] != char:
                state = failures[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                found = stop if found is None or len(stop) > len(found) else found
                state = failures[state - 1]
            self._states[i] = state
        return found


def _failures(stop: str) -> list[int]:
    """failures[i]: length of the longest proper prefix of stop[: i + 1] that is also its suffix."""
    out = [0] * len(stop)
    k = 0
    for i in range(1, len(stop)):
        while k and stop[i] != stop[k]:
            k = out[k - 1]
        if stop[i] == stop[k]:
            k += 1
        out[i] = k
    return out

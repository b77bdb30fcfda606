"""Cuts an SSE byte stream at event boundaries without looking inside.

When a replica dies in the middle of an event, half an event has no use for the client, and an error event appended to
it would be read as part of it. So the tail after the last blank line is held back until the rest arrives.
"""

from __future__ import annotations

_ENDS = (b"\n\n", b"\r\n\r\n")
_MAX_HELD_BYTES = 1 << 20


def count_events(whole: bytes) -> int:
    """How many events there are in bytes that end at an event boundary; data has no line breaks of its own."""
    return sum(whole.count(end) for end in _ENDS)


class FrameBuffer:
    """Bytes in, whole events out. What is held exceeds 1 MiB only if one event does; then it is passed on as it is."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def push(self, data: bytes) -> bytes:
        """Everything up to the last event boundary; empty when there is none yet."""
        if not self._held and data.endswith(_ENDS):
            return data
        start = max(0, len(self._held) - 3)  # a boundary may lie across the seam
        joined = self._held + data
        cut = max(joined.rfind(end, start) + len(end) if end in joined[start:] else 0 for end in _ENDS)
        if len(joined) - cut > _MAX_HELD_BYTES:
            cut = len(joined)
        self._held = joined[cut:]
        return joined[:cut]

    def rest(self) -> bytes:
        """What was held back, for a stream that ended in order."""
        held, self._held = self._held, b""
        return held

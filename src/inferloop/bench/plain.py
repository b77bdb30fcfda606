"""An answer that was not streamed: all its tokens come with its last byte."""

from __future__ import annotations

import msgspec

from inferloop.bench.frames import Frame, decode_frame
from inferloop.bench.stream import GIVEN_UP, MAX_EXCERPT, StreamResult


class PlainReader:
    """The same face as `StreamReader`. The tokens are those of `usage`, or one when the server does not count."""

    __slots__ = ("_pieces", "_t_last_ns", "detail")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._t_last_ns = 0
        self.detail: str | None = None

    def feed(self, t_ns: int, piece: bytes) -> None:
        self._pieces.append(piece)
        self._t_last_ns = t_ns

    def finish(self, *, cut: bool = False) -> StreamResult:
        """`cut` says that the body ended before its framing said so."""
        if cut:
            return _failed("truncated")
        body = b"".join(self._pieces)
        try:
            answer: Frame | None = decode_frame(body)
        except (msgspec.DecodeError, RecursionError):
            answer = None
        if answer is None or answer.error is not None or not answer.choices:
            self.detail = body[:MAX_EXCERPT].decode(errors="replace")
            return _failed("protocol")
        if answer.choices[0].finish_reason in GIVEN_UP:
            self.detail = f"finish_reason {answer.choices[0].finish_reason}"
            return _failed("truncated")
        has_output, is_answer, _ = answer.choices[0].content()
        usage, timings = answer.usage, answer.inferloop
        total = None if usage is None else usage.completion_tokens
        count = total or int(has_output)  # where text came a token came, whatever the server counts
        queue_ms = timings.queue_ms if timings is not None else None
        cached = None if usage is None else usage.num_cached_tokens
        return StreamResult(
            None if count else "empty_stream",
            (self._t_last_ns,) if count else (),
            (count,) if count else (),
            None if usage is None else usage.prompt_tokens,
            count,
            cached or 0,
            answer.choices[0].finish_reason,
            queue_ms if isinstance(queue_ms, float) else None,
            self._t_last_ns if is_answer else None,
            "usage" if total else "frames",
            total == 0 < count,
            tells_cached=cached is not None,
        )


def _failed(error: str) -> StreamResult:
    return StreamResult(error, (), (), None, 0, 0, None, None, None, "frames", False)

"""One streamed OpenAI answer (chat or completions) turned into token stamps.

How many tokens a frame holds, by the best source there is: the server's own count (`inferloop.num_tokens`, asked for
with `x-inferloop-timings: 1`), the growth of `usage` when every frame has it and it grows from the first frame on, the
total in the last usage spread over the frames, else one per frame. A frame that has only a role, a finish reason or
usage holds no token. Reasoning and tool calls are output like any other. A total moves neither the first token nor the
last: where text came a token came, also where the server does not count it. The answer is complete at `[DONE]`: nobody
reads what follows.

Nearly all frames of a stream differ in the text alone. So the bytes around the text of a frame that was understood are
kept, and a frame with the same bytes around another plain text means the same and is not decoded. Where no bytes of an
earlier read belong to them, such frames are told by the blank lines between them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from inferloop.bench.frames import Choice, Frame, Usage, decode_frame
from inferloop.bench.sse import EventParser
from inferloop.measure.chunks import Chunks

GIVEN_UP = ("abort", "error")
"""Finish reasons of servers that end an answer in order although they did not finish it."""
MAX_EXCERPT = 300
"""Bytes of what a server said that are kept when a request fails."""
_TEXT_KEY = b'"content":"'
_TEXT_KEYS = (_TEXT_KEY, b'"content": "', b'"text":"', b'"text": "')


class StreamResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`error`: None, or empty_stream | truncated | protocol. `counted_by`: server | usage | total | frames, the last
    where nobody counted.

    Frame i with tokens arrived at `times_ns[i]` and held `counts[i]` of them. `count_mismatch` says that the frames'
    token counts and the server's total differ by more than the end token.
    """

    error: str | None
    times_ns: tuple[int, ...]
    counts: tuple[int, ...]
    num_input_tokens: int | None
    num_output_tokens: int
    num_cached_tokens: int
    finish_reason: str | None
    queue_ms: float | None
    t_first_answer_ns: int | None
    """The first frame with content that is not reasoning; None when there was none."""
    counted_by: str
    count_mismatch: bool
    text: str = ""
    empty_frames_ns: tuple[int, ...] = ()
    """Arrivals of frames of the answer without a token of it: its role, its finish reason."""
    tells_cached: bool = False
    """Whether the server said how many tokens came from its cache; else `num_cached_tokens` is 0."""

    @property
    def chunks(self) -> Chunks:
        return Chunks(self.times_ns, self.counts)


class StreamReader:
    """Feed (arrival, bytes) pieces in order; `finish` when the body ended. `on_done` is told when `[DONE]` came."""

    __slots__ = (
        *("_events", "_times", "_told", "_so_far", "_num_input", "_num_output", "_num_cached", "_queue_ms"),
        *("_finish_reason", "_t_first_answer_ns", "_done", "_error", "_empty_ns", "_texts"),
        *("_before", "_after", "_same_told", "_on_done", "detail"),
    )

    def __init__(self, *, keep_text: bool = False, on_done: Callable[[int], None] | None = None) -> None:
        self._on_done = on_done
        self._events = EventParser()
        self._times: list[int] = []
        self._told: list[int | None] = []  # the server's count
        self._so_far: list[int | None] = []  # usage so far
        self._num_input: int | None = None
        self._num_output: int | None = None
        self._num_cached: int | None = None
        self._queue_ms: float | None = None
        self._finish_reason: str | None = None
        self._t_first_answer_ns: int | None = None
        self._done = False
        self._error: str | None = None
        self.detail: str | None = None
        """What the server said that made the answer fail."""
        self._empty_ns: list[int] = []
        self._texts: list[str] | None = [] if keep_text else None
        self._before = self._after = b""
        self._same_told: int | None = None

    def feed(self, t_ns: int, piece: bytes) -> None:
        """Never raises: what cannot be understood makes the result's error `protocol`."""
        if 92 in piece or 13 in piece:
            self._take_events(t_ns, piece)
            return
        if not self._events.is_clean:
            end = piece.find(b"\n\n") + 2
            if end < 2:
                self._take_events(t_ns, piece)
                return
            self._take_events(t_ns, piece[:end])
            piece = piece[end:]
        *blocks, rest = piece.split(b"\n\n")
        for block in blocks:
            # The same as the frame before but for a text without escapes?
            text_end = len(block) - len(self._after)
            start = len(self._before)
            if (
                text_end > start
                and block.startswith(self._before)
                and block.endswith(self._after)
                and block.find(b'"', start) == text_end
                and 10 not in block
            ):
                self._times.append(t_ns)
                self._told.append(self._same_told)
                self._so_far.append(None)
            else:
                self._take_events(t_ns, block + b"\n\n")
        if rest:
            self._take_events(t_ns, rest)

    def finish(self, *, cut: bool = False) -> StreamResult:
        """`cut` says that the body ended before its framing said so."""
        times, counts, counted_by, mismatch = self._counted()
        error = self._error
        has_ended = self._done or (self._finish_reason is not None and not cut)
        if error is None and not has_ended and (times or cut):
            error = "truncated"
        if error is None and self._finish_reason in GIVEN_UP:
            error, self.detail = "truncated", f"finish_reason {self._finish_reason}"
        if error is None and not times:
            error = "empty_stream"
        return StreamResult(
            error,
            times,
            counts,
            self._num_input,
            sum(counts) if self._num_output is None else self._num_output,
            self._num_cached or 0,
            self._finish_reason,
            self._queue_ms,
            self._t_first_answer_ns,
            counted_by,
            mismatch,
            "".join(self._texts or ()),
            tuple(self._empty_ns),
            self._num_cached is not None,
        )

    def _take_events(self, t_ns: int, piece: bytes) -> None:
        for data in self._events.feed(piece):
            self._take_data(t_ns, data)

    def _take_data(self, t_ns: int, data: bytes) -> None:
        if self._done:
            return
        if data.strip() == b"[DONE]":
            self._done = True
            self._before = b"\n"  # begins no frame that could be like the one before
            if self._on_done is not None:
                self._on_done(t_ns)
            return
        try:
            frame = decode_frame(data)
        except (msgspec.DecodeError, RecursionError):
            self._fail("protocol", data)
            return
        if frame.error is not None:
            self._fail("truncated", data)  # a failure in mid-stream ends the answer early
            return
        if frame.choices:
            self._take_choice(t_ns, frame.choices[0], frame, data)
        if frame.usage is not None:
            self._take_usage(frame.usage)
        if frame.inferloop is not None and isinstance(frame.inferloop.queue_ms, float):
            self._queue_ms = frame.inferloop.queue_ms

    def _fail(self, error: str, data: bytes) -> None:
        if self._error is None:
            self._error, self.detail = error, data[:MAX_EXCERPT].decode(errors="replace")

    def _take_choice(self, t_ns: int, choice: Choice, frame: Frame, data: bytes) -> None:
        has_output, is_answer, text = choice.content()
        timings, usage = frame.inferloop, frame.usage
        told = None
        if timings is not None and timings.queue_ms is msgspec.UNSET:  # beside queue_ms stands the total
            told = timings.num_tokens
        if has_output or told:
            self._times.append(t_ns)
            self._told.append(told)
            self._so_far.append(None if usage is None else usage.completion_tokens)
        else:
            self._empty_ns.append(t_ns)
        self._finish_reason = choice.finish_reason or self._finish_reason
        if is_answer and self._t_first_answer_ns is None:
            self._t_first_answer_ns = t_ns
        if self._texts is not None:
            self._texts.append(text)
        elif is_answer and len(frame.choices or ()) == 1 and usage is None and choice.is_plain:
            self._learn(data, text, told)

    def _learn(self, data: bytes, text: str, told: int | None) -> None:
        """Keep what stands around the text, where that can be told without doubt."""
        encoded = text.encode()
        for key in _TEXT_KEYS:
            start = data.find(key)
            if start < 0:
                continue
            start += len(key)
            end = start + len(encoded)
            if data[start:end] == encoded and data[end : end + 1] == b'"' and 92 not in data and data.count(key) == 1:
                self._before, self._after, self._same_told = b"data: " + data[:start], data[end:], told
            return

    def _take_usage(self, usage: Usage) -> None:
        if usage.completion_tokens is not None:
            self._num_output = usage.completion_tokens
        if usage.prompt_tokens is not None:
            self._num_input = usage.prompt_tokens
        self._num_cached = usage.num_cached_tokens

    def _counted(self) -> tuple[tuple[int, ...], tuple[int, ...], str, bool]:
        """(arrivals, counts, by whom they were counted, whether they contradict the total)."""
        times, told, total = self._times, self._told, self._num_output
        if not times:
            return (), (), "frames", False
        if None not in told:
            counts, source = [n or 0 for n in told], "server"
        elif None not in self._so_far and self._so_far[0]:
            seen = [n or 0 for n in self._so_far]
            counts, source = [b - a for a, b in zip([0, *seen], seen, strict=False)], "usage"
        elif total:
            counts, source = _spread(total, len(times)), "total"
        else:
            counts, source = [1] * len(times), "frames"
        mismatch = total is not None and abs(sum(counts) - total) > 1
        if min(counts) <= 0:
            kept = [(t, n) for t, n in zip(times, counts, strict=True) if n > 0]
            return tuple(t for t, _ in kept), tuple(n for _, n in kept), source, mismatch
        return tuple(times), tuple(counts), source, mismatch


def _spread(total: int, num_frames: int) -> list[int]:
    """`total` tokens over frames as evenly as whole tokens allow: at least one each while there are enough, else one
    for the first, one for the last and the others between. A server that cuts a token's text into pieces, or leaves
    thinking out of its total, does not change when an answer began and ended."""
    each, rest = divmod(total, num_frames)
    if each:
        return [each] * (num_frames - rest) + [each + 1] * rest
    counts = [0] * num_frames
    steps = max(1, total - 1)
    for k in range(steps + 1):
        counts[k * (num_frames - 1) // steps] = 1
    return counts

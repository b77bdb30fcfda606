"""One streamed OpenAI answer (chat or completions) turned into token stamps.

How many tokens a frame holds, by the best source there is: the server's own count (`inferloop.num_tokens`, asked for
with `x-inferloop-timings: 1`), the growth of `usage` when every frame has it, else one per frame, corrected by the
total in the last usage. A frame that has only a role, a finish reason or usage holds no token. Reasoning and tool calls
are output like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from inferloop.bench.sse import EventParser
from inferloop.measure.timing import Chunk

_decode = msgspec.json.Decoder().decode
_MAX_COUNT = 2**31 - 1
_TEXT_FIELDS = ("content", "reasoning", "reasoning_content", "refusal")


@dataclass(frozen=True, slots=True)
class StreamResult:
    """`error`: None, or empty_stream | truncated | protocol. `counted_by`: server | usage | frames.

    `count_mismatch` says that the frames' token counts and the server's total differ by more than the end token.
    """

    error: str | None
    chunks: tuple[Chunk, ...]
    num_input_tokens: int | None
    num_output_tokens: int
    num_cached_tokens: int
    finish_reason: str | None
    queue_ms: float | None
    t_first_answer_ns: int | None
    """The first frame with content that is not reasoning; None when there was none."""
    counted_by: str
    count_mismatch: bool
    text: str
    empty_frames_ns: tuple[int, ...] = ()
    """Arrivals of frames of the answer without a token of it: its role, its finish reason."""


class StreamReader:
    """Feed (arrival, bytes) pieces in order; `finish` when the body ended."""

    def __init__(self, *, keep_text: bool = False) -> None:
        self._events = EventParser()
        self._frames: list[tuple[int, int | None, int | None]] = []  # arrival, server's count, usage so far
        self._num_input: int | None = None
        self._num_output: int | None = None
        self._num_cached = 0
        self._queue_ms: float | None = None
        self._finish_reason: str | None = None
        self._t_first_answer_ns: int | None = None
        self._done = False
        self._error: str | None = None
        self._empty_ns: list[int] = []
        self._texts: list[str] | None = [] if keep_text else None

    def feed(self, t_ns: int, piece: bytes) -> None:
        """Never raises: what cannot be understood makes the result's error `protocol`."""
        for data in self._events.feed(piece):
            if data.strip() == b"[DONE]":
                self._done = True
                continue
            try:
                event = _decode(data)
            except (msgspec.DecodeError, RecursionError):
                self._error = self._error or "protocol"
                continue
            if not isinstance(event, dict):
                self._error = self._error or "protocol"
            elif event.get("error") is not None:
                self._error = self._error or "truncated"  # a failure in mid-stream ends the answer early
            else:
                try:
                    self._take(t_ns, event)
                except (AttributeError, TypeError, KeyError, ValueError):  # JSON, but not shaped like a chunk
                    self._error = self._error or "protocol"

    def finish(self, *, cut: bool = False) -> StreamResult:
        """`cut` says that the body ended before its framing said so."""
        chunks, counted_by, mismatch = self._chunks()
        error = self._error
        ended = self._done or self._finish_reason is not None
        if error is None and (cut or not ended) and (chunks or cut):
            error = "truncated"
        if error is None and not chunks:
            error = "empty_stream"
        return StreamResult(
            error=error,
            chunks=chunks,
            num_input_tokens=self._num_input,
            num_output_tokens=sum(c.num_tokens for c in chunks) if self._num_output is None else self._num_output,
            num_cached_tokens=self._num_cached,
            finish_reason=self._finish_reason,
            queue_ms=self._queue_ms,
            t_first_answer_ns=self._t_first_answer_ns,
            counted_by=counted_by,
            count_mismatch=mismatch,
            text="".join(self._texts or ()),
            empty_frames_ns=tuple(self._empty_ns),
        )

    def _take(self, t_ns: int, event: dict[str, Any]) -> None:
        choices = event.get("choices") or ()
        usage: dict[str, Any] = event.get("usage") or {}
        timings: dict[str, Any] = event.get("inferloop") or {}
        if choices:
            self._take_choice(t_ns, choices[0], usage, timings)
        if usage:
            self._num_output = _count(usage, "completion_tokens")
            self._num_input = _count(usage, "prompt_tokens")
            self._num_cached = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens") or 0
        if timings.get("queue_ms") is not None:
            self._queue_ms = _milliseconds(timings["queue_ms"])

    def _take_choice(self, t_ns: int, choice: dict[str, Any], usage: dict[str, Any], timings: dict[str, Any]) -> None:
        has_output, is_answer, text = _content(choice)
        told = None if "queue_ms" in timings else _count(timings, "num_tokens")  # beside queue_ms stands the total
        if has_output or told:
            self._frames.append((t_ns, told, _count(usage, "completion_tokens")))
        else:
            self._empty_ns.append(t_ns)
        reason = choice.get("finish_reason")
        if not isinstance(reason, str | None):
            raise TypeError("finish_reason is not a text")
        self._finish_reason = reason or self._finish_reason
        if is_answer and self._t_first_answer_ns is None:
            self._t_first_answer_ns = t_ns
        if self._texts is not None:
            self._texts.append(text)

    def _chunks(self) -> tuple[tuple[Chunk, ...], str, bool]:
        times = [t for t, _, _ in self._frames]
        total = self._num_output
        if not times:
            return (), "frames", False
        if all(told is not None for _, told, _ in self._frames):
            counts, source = [told or 0 for _, told, _ in self._frames], "server"
        elif all(so_far is not None for _, _, so_far in self._frames):
            seen = [so_far or 0 for _, _, so_far in self._frames]
            counts, source = [b - a for a, b in zip([0, *seen], seen, strict=False)], "usage"
        else:
            counts, source = _spread(len(times) if total is None else total, len(times)), "frames"
        mismatch = total is not None and abs(sum(counts) - total) > 1
        kept = tuple(Chunk(t, n) for t, n in zip(times, counts, strict=True) if n > 0)
        return kept, source, mismatch


def _count(values: dict[str, Any], name: str) -> int | None:
    """Raises ValueError for what is there and is no count: it must not reach a sum or a record."""
    value = values.get(name)
    if value is None or (type(value) is int and 0 <= value <= _MAX_COUNT):
        return value
    raise ValueError(f"{name} is no count: {value!r}")


def _milliseconds(value: Any) -> float:
    """Raises ValueError for what is no duration."""
    if type(value) in (int, float) and 0 <= value < math.inf:
        return float(value)
    raise ValueError(f"no duration: {value!r}")


def _spread(total: int, num_frames: int) -> list[int]:
    """`total` tokens over frames as evenly as whole tokens allow, at least one each while there are enough."""
    each, rest = divmod(total, num_frames)
    return [each + (i >= num_frames - rest) for i in range(num_frames)]


def _content(choice: dict[str, Any]) -> tuple[bool, bool, str]:
    """(whether the frame holds output, whether some of it is the answer, its text)."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        found = choice.get("text")
        text = found if isinstance(found, str) else ""
        return bool(text), bool(text), text
    content = delta.get("content")
    if len(delta) == 1 and isinstance(content, str):
        return bool(content), bool(content), content
    texts = {name: delta[name] for name in _TEXT_FIELDS if isinstance(delta.get(name), str) and delta[name]}
    has_output = bool(texts) or bool(delta.get("tool_calls")) or bool(delta.get("function_call"))
    return has_output, "content" in texts, "".join(texts.values())

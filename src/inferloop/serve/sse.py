"""Server-sent events: each dialect's chunks are prebuilt bytes with only the text encoded per chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from inferloop.backends.protocols import Delta
from inferloop.serve.errors import error_object
from inferloop.serve.replies import Finish, Timings, Usage
from inferloop.serve.wire import Call

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must pass chunks on as they come
]

_dumps = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is the same in every chunk of an answer, and the call that it answers. `with_timings` adds our extension
    object; `token_bytes` tells what one token stands for, for log-probabilities."""

    id: str
    created: int
    model: str
    call: Call
    with_timings: bool
    token_bytes: Callable[[int], bytes]
    echoes: tuple[str, ...] = ("",)
    """What each choice's text begins with; as many as there are choices."""
    usage_so_far: Callable[[], Usage] | None = None
    """Asked for every chunk of a stream that tells it."""


class Encoder(Protocol):
    """One answer, of one or several choices, in one dialect of the OpenAI API."""

    def opening(self, first: Delta) -> bytes:
        """Sent once before the chunk of the first delta that came, for all choices; may be empty."""
        ...

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Empty when there is nothing that a client may see."""
        ...

    def ended(self, index: int, finish: Finish) -> bytes:
        """Finish chunk of a choice that is not the last to end."""
        ...

    def closing(self, index: int, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        """Finish chunk of the last choice to end, usage chunk if asked for, [DONE]."""
        ...

    def broken(self, error: BaseException) -> bytes:
        """The last thing sent when the answer fails after its beginning went out."""
        ...

    def body(self, finishes: Sequence[Finish], usage: Usage, timings: Timings) -> bytes:
        """The whole answer, from the deltas given to `collect`."""
        ...

    def collect(self, index: int, delta: Delta) -> None:
        """Keep a delta for `body`."""
        ...


class ChunkWriter:
    """`data: {head, choices: [...], usage, inferloop}` around a choice."""

    def __init__(self, head: AnswerHead, object_: str) -> None:
        fields = _dumps({"id": head.id, "object": object_, "created": head.created, "model": head.model})
        self._open = b"data: " + fields[:-1] + b',"choices":['
        self._include_usage, self._with_timings = head.call.include_usage, head.with_timings
        self._no_usage, self._usage_so_far = b',"usage":null' if self._include_usage else b"", head.usage_so_far
        self._counts_tokens = head.with_timings or head.call.return_token_ids

    def choice(self, choice: bytes, timings: Timings | None, told: bytes = b"") -> bytes:
        """`told` are more fields of the chunk, beginning with a comma."""
        extension = b',"inferloop":' + _dumps(timings) if self._with_timings and timings is not None else b""
        usage = self._no_usage
        if self._usage_so_far is not None:
            usage = b',"usage":' + _dumps(self._usage_so_far())
        return b"".join((self._open, choice, b"]", told, usage, extension, b"}\n\n"))

    def frame(self, before: bytes, after: bytes) -> TextFrame | None:
        """For the chunks of a choice that is `before`, a text and `after`; None when they differ in more than that."""
        if self._usage_so_far is not None:
            return None
        return TextFrame(self._open + before, after + b"]" + self._no_usage, with_timings=self._with_timings)

    def closing(self, choice: bytes, usage: Usage, timings: Timings) -> bytes:
        """The last event before [DONE] has the timings."""
        if not self._include_usage:
            return self.choice(choice, timings) + DONE
        extension = b',"inferloop":' + _dumps(timings) if self._with_timings else b""
        last = b"".join((self._open, b'],"usage":', _dumps(usage), extension, b"}\n\n"))
        return self.choice(choice, Timings(num_tokens=0)) + last + DONE

    def wants(self, delta: Delta) -> bool:
        """Text is for everybody."""
        return bool(delta.text) or self.wants_tokens(delta)

    def wants_tokens(self, delta: Delta) -> bool:
        """Tokens whose text is still held back are only for those who count them."""
        return delta.logprobs is not None or (self._counts_tokens and bool(delta.token_ids))


class TextFrame:
    """Chunks that differ in nothing but a text, and in how many tokens it stands for if that is told: nearly all of the
    chunks that are ever sent."""

    def __init__(self, before: bytes, after: bytes, *, with_timings: bool) -> None:
        self._before, self._after, self._with_timings = before, after, with_timings
        self._ends: dict[int, bytes] = {}
        """By number of tokens."""

    def chunk(self, text: str, num_tokens: int) -> bytes:
        end = self._ends.get(num_tokens)
        if end is None:
            told = b',"inferloop":' + _dumps(Timings(num_tokens=num_tokens)) if self._with_timings else b""
            end = self._ends[num_tokens] = self._after + told + b"}\n\n"
        return self._before + _dumps(text) + end


def error_event(error: BaseException) -> bytes:
    """A failure in mid-stream; the stream ends after it, without [DONE]."""
    return b"data: " + error_object(error) + b"\n\n"

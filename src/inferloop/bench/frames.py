"""What is read of a frame of an answer, and nothing else of it. Counts are checked here: a wrong one reaches no sum."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Duration = Annotated[float, Meta(ge=0)]


class Delta(msgspec.Struct, gc=False):
    """What a frame adds to the message, or the whole message of an answer that was not streamed. Texts may be of any
    type in what servers send; only strings count."""

    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None

    @property
    def has_others(self) -> bool:
        """Whether there is more than the answer's text."""
        return bool(self.reasoning or self.reasoning_content or self.refusal or self.tool_calls or self.function_call)


class Choice(msgspec.Struct, gc=False):
    delta: Delta | None = None
    message: Delta | None = None
    text: Any = None
    finish_reason: str | None = None

    def content(self) -> tuple[bool, bool, str]:
        """(whether the frame holds output, whether some of it is the answer, its text)."""
        delta = self.delta or self.message
        if delta is None:
            text = self.text if isinstance(self.text, str) else ""
            return bool(text), bool(text), text
        content = delta.content if isinstance(delta.content, str) else ""
        if content and not delta.has_others:
            return True, True, content
        others = (delta.reasoning, delta.reasoning_content, delta.refusal)
        text = content + "".join(other for other in others if isinstance(other, str))
        return bool(text) or bool(delta.tool_calls) or bool(delta.function_call), bool(content), text

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the answer's text can be in it."""
        return self.finish_reason is None and (self.delta is None or not self.delta.has_others)


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        """None when the server does not tell."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Timings(msgspec.Struct, gc=False):
    num_tokens: _Count | None = None
    queue_ms: _Duration | UnsetType | None = UNSET


class Frame(msgspec.Struct, gc=False):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    inferloop: _Timings | None = None
    error: Any = None


decode_frame = msgspec.json.Decoder(Frame).decode
"""Raises msgspec.DecodeError or RecursionError for what is no such frame."""

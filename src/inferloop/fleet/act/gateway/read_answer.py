"""Reads an OpenAI answer, whole or streamed, for its checks and its tokens, and takes out what only we asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from inferloop.fleet.act.gateway.account import Tokens
from inferloop.fleet.act.gateway.body import Dialect
from inferloop.fleet.decide.answer_checks import AnswerSummary, ChoiceSummary, ToolCall

_EVENT_END = re.compile(rb"\r?\n\r?\n")
_LAST_TYPES = ("response.completed", "response.incomplete")
_NO_USAGE = b',"usage":null'
"""Inside of a text it would have backslashes."""


class UnreadableError(Exception):
    """It is no answer of the API that we know, so nothing of it can be checked; the text says why."""


class BrokenStreamError(Exception):
    """The stream ended with an error, or before its end. Where that was no fault but a cancel or the deadline, `ended`
    is the status that goes with it, and `body` says so."""

    def __init__(self, message: str, ended: int | None = None, body: bytes = b"") -> None:
        self.ended, self.body = ended, body
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Read:
    summary: AnswerSummary
    tokens: Tokens | None


def read_whole(body: bytes, dialect: Dialect, *, reads_logprobs: bool) -> Read:
    """Raises UnreadableError."""
    try:
        data = msgspec.json.decode(body)
        choices = _response_choices(data) if dialect == "responses" else _whole_choices(data, reads_logprobs)
        return Read(AnswerSummary(choices), tokens_of(data.get("usage")))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from None


def read_stream(body: bytes, dialect: Dialect, *, reads_logprobs: bool) -> Read:
    """A stream that has come to its end. Raises BrokenStreamError, UnreadableError."""
    events = [data for _, data in _events(body) if data]
    try:
        frames = [msgspec.json.decode(data) for data in events if data != b"[DONE]"]
        if broken := next((f for f in frames if f.get("error") or f.get("type") in ("error", "response.failed")), None):
            raise _broken_by(broken)
        if dialect == "responses":
            if not frames or frames[-1].get("type") not in _LAST_TYPES:
                raise BrokenStreamError("the stream ended without its last event")
            last = frames[-1]["response"]
            return Read(AnswerSummary(_response_choices(last)), tokens_of(last.get("usage")))
        if not events or events[-1] != b"[DONE]":
            raise BrokenStreamError("the stream ended without [DONE]")
        usage = next((f["usage"] for f in reversed(frames) if f.get("usage")), None)
        return Read(AnswerSummary(_joined(frames, reads_logprobs)), tokens_of(usage))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from None


def _broken_by(frame: dict[str, Any]) -> BrokenStreamError:
    """Replicas tell of what ended a request by an error of this type, in a stream as elsewhere."""
    error = frame.get("error") or (frame.get("response") or {}).get("error")
    text = f"the stream ended with an error: {str(frame)[:200]}"
    if not isinstance(error, dict) or error.get("type") != "request_ended_error":
        return BrokenStreamError(text)
    ended = 408 if error.get("code") == "timeout" else 499
    return BrokenStreamError(text, ended, msgspec.json.encode({"error": error}))


def tokens_of(usage: Any) -> Tokens | None:
    """Of chats and completions, or of responses."""
    if not isinstance(usage, dict):
        return None
    for given, details, made in (
        ("prompt_tokens", "prompt_tokens_details", "completion_tokens"),
        ("input_tokens", "input_tokens_details", "output_tokens"),
    ):
        more = usage.get(details)
        counts = (usage.get(given), more.get("cached_tokens") if isinstance(more, dict) else None, usage.get(made))
        num_input, num_cached, num_output = (n if type(n) is int and n >= 0 else None for n in counts)
        if num_input is not None:
            return Tokens(num_input, min(num_cached or 0, num_input), num_output or 0)  # embeddings make none
    return None


class _Counted(msgspec.Struct):
    usage: dict[str, Any] | None = None


def tokens_alone(body: bytes) -> Tokens | None:
    """Of a whole answer, without reading the rest of it; None where it tells none."""
    try:
        return tokens_of(msgspec.json.decode(body, type=_Counted).usage)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def without_logprobs(body: bytes) -> bytes:
    """A whole answer as it would be had nobody asked for them."""
    data = msgspec.json.decode(body)
    for choice in data["choices"]:
        choice["logprobs"] = None
    return msgspec.json.encode(data)


def clean_stream(body: bytes, *, usage: bool, logprobs: bool) -> bytes:
    """A whole stream without the usage, or the log-probabilities, that nobody but us asked for."""
    kept = []
    for event, data in _events(body):
        if data in (b"", b"[DONE]"):
            kept.append(event)
            continue
        frame = msgspec.json.decode(data)
        if usage and frame.pop("usage", None) and not frame["choices"]:
            continue
        for choice in frame["choices"] if logprobs else ():
            choice["logprobs"] = None
        if logprobs and frame["choices"] and not frame.get("usage") and not any(map(_says, frame["choices"])):
            continue  # a token without text yet, which is told for its log-probability alone
        kept.append(b"data: " + msgspec.json.encode(frame) + b"\n\n")
    return b"".join(kept)


def _says(choice: Any) -> bool:
    delta = choice.get("delta")
    return bool(choice.get("finish_reason") or (choice["text"] if delta is None else any(delta.values())))


@dataclass(slots=True)
class UsageTap:
    """Sees the events of a stream that is passed on and remembers the usage that it ends with. `hides`: the caller did
    not ask for it, so its event is dropped and `"usage":null` taken out of the others."""

    hides: bool
    _last: bytes = field(default=b"", init=False)

    def __call__(self, whole: bytes) -> bytes:
        if b'"usage"' not in whole:
            return whole
        if self.hides:
            whole = whole.replace(_NO_USAGE, b"")
        if b'"usage"' not in whole:
            return whole
        kept = []
        for event, data in _events(whole):
            if b'"usage":{' in data or b'"usage": {' in data:
                self._last = data
                if self.hides and _has_no_choice(data):
                    continue
            kept.append(event)
        return b"".join(kept)

    @property
    def tokens(self) -> Tokens | None:
        try:
            data = msgspec.json.decode(self._last)
            return tokens_of(data.get("usage") or (data.get("response") or {}).get("usage"))
        except (msgspec.MsgspecError, UnicodeError, RecursionError, AttributeError, TypeError):
            return None


def _has_no_choice(data: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(data).get("choices") == [])
    except (msgspec.MsgspecError, UnicodeError, RecursionError, AttributeError):
        return False


def _events(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(the event to the letter, its data). Comments and whatever has no data are passed on too, with none."""
    start = 0
    for end in [*(found.end() for found in _EVENT_END.finditer(body)), len(body)]:
        event, start = body[start:end], end
        lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
        if lines:
            yield event, b"\n".join(lines)
        elif event:
            yield event, b""


def _whole_choices(data: Any, reads_logprobs: bool) -> tuple[ChoiceSummary, ...]:
    return tuple(_choice(c, c.get("message"), _logprobs(c) if reads_logprobs else []) for c in data["choices"])


def _choice(choice: Any, message: Any, logprobs: list[float]) -> ChoiceSummary:
    if message is None:
        return ChoiceSummary(choice["text"], (), _mean(logprobs))
    calls = tuple(
        ToolCall(call["function"]["name"], call["function"]["arguments"] or "")
        for call in message.get("tool_calls") or ()
    )
    return ChoiceSummary(message.get("content") or "", calls, _mean(logprobs))


def _joined(frames: Iterable[Any], reads_logprobs: bool) -> tuple[ChoiceSummary, ...]:
    """The choices that the chunks of a stream are parts of."""
    texts: dict[int, list[str]] = {}
    calls: dict[int, dict[int, list[str]]] = {}
    logprobs: dict[int, list[float]] = {}
    for frame in frames:
        for choice in frame["choices"]:
            index, delta = choice["index"], choice.get("delta")
            told = choice["text"] if delta is None else delta.get("content")
            texts.setdefault(index, []).append(told or "")
            logprobs.setdefault(index, []).extend(_logprobs(choice) if reads_logprobs else ())
            for part in (delta or {}).get("tool_calls") or ():
                call = calls.setdefault(index, {}).setdefault(part["index"], ["", ""])
                function = part.get("function") or {}
                call[0] += function.get("name") or ""
                call[1] += function.get("arguments") or ""
    return tuple(
        ChoiceSummary(
            "".join(texts[i]),
            tuple(ToolCall(name, arguments) for name, arguments in calls.get(i, {}).values()),
            _mean(logprobs[i]),
        )
        for i in sorted(texts)
    )


def _response_choices(data: Any) -> tuple[ChoiceSummary, ...]:
    """An answer of /v1/responses is one choice of several items."""
    items = data["output"]
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    calls = tuple(ToolCall(item["name"], item["arguments"]) for item in items if item["type"] == "function_call")
    logprobs = [entry["logprob"] for part in parts for entry in part.get("logprobs") or ()]
    return (ChoiceSummary("".join(part.get("text") or "" for part in parts), calls, _mean(logprobs)),)


def _logprobs(choice: Any) -> list[float]:
    told = choice.get("logprobs") or {}
    chat = told.get("content")
    values = [entry["logprob"] for entry in chat] if chat else told.get("token_logprobs") or []
    return [value for value in values if value is not None]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None

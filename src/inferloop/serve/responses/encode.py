"""/v1/responses: how an answer looks, whole or as typed events.

A stream's events are numbered from 0. Each says in its `event:` line and in its `type` what it is; the last one is
response.completed, response.incomplete or response.failed, and no [DONE] follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from inferloop.backends.protocols import Delta
from inferloop.core.errors import RequestError
from inferloop.engine.text.answer import AnswerReader
from inferloop.serve.errors import error_object
from inferloop.serve.reasoning import ReasoningTokens
from inferloop.serve.replies import Finish, Timings, Usage
from inferloop.serve.responses.output import Event, Output
from inferloop.serve.responses.replies import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseStatus,
    ResponseText,
    ResponseUsage,
)
from inferloop.serve.responses.wire import ResponseCall, TextFormat
from inferloop.serve.sse import AnswerHead
from inferloop.serve.tokens import chat_logprobs

_dumps = msgspec.json.encode


class ResponseEncoder:
    """See serve.sse.Encoder; there is one choice, index 0."""

    def __init__(self, head: AnswerHead) -> None:
        assert isinstance(head.call, ResponseCall)
        self._head, self._call = head, head.call
        self._reader, self._output = AnswerReader(head.call.answer), Output()
        self._reasoning = ReasoningTokens()
        self._num_events = self._num_tokens_untold = 0

    def opening(self, first: Delta) -> bytes:
        response = self._response("in_progress", [])
        return self._sent((f"response.{name}", {"response": response}) for name in ("created", "in_progress"))

    def chunk(self, index: int, delta: Delta) -> bytes:
        self._num_tokens_untold += len(delta.token_ids)
        events = self._add(delta)
        if self._head.with_timings and events:
            events[-1][1]["inferloop"] = Timings(num_tokens=self._num_tokens_untold)
            self._num_tokens_untold = 0
        return self._sent(events)

    def ended(self, index: int, finish: Finish) -> bytes:
        raise AssertionError("a response has one choice")

    def closing(self, index: int, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        status = _status(finish)
        events = self._output.close(status)
        final = self._final(status, usage, msgspec.structs.replace(timings, num_tokens=self._num_tokens_untold))
        return self._sent([*events, (f"response.{status}", {"response": final})])

    def broken(self, error: BaseException) -> bytes:
        told = msgspec.json.decode(error_object(error))["error"]
        response = self._response("failed", self._output.so_far())
        response.error = ResponseError(
            code="invalid_prompt" if isinstance(error, RequestError) else "server_error",
            message=told["message"],
            param=told["param"],
            type=told["type"],
        )
        return self._sent([("response.failed", {"response": response})])

    def collect(self, index: int, delta: Delta) -> None:
        self._add(delta)

    def body(self, finishes: Sequence[Finish], usage: Usage, timings: Timings) -> bytes:
        status = _status(finishes[0])
        self._output.close(status)
        return _dumps(self._final(status, usage, timings))

    def _add(self, delta: Delta) -> list[Event]:
        """Keep what `delta` brings, and tell it."""
        rows = []
        if delta.logprobs is not None:
            rows = chat_logprobs(self._head.token_bytes, delta.token_ids, delta.logprobs)
        found = [self._reader.push(delta.text)]
        if delta.finish_reason is not None:
            found.append(self._reader.finish())
        self._reasoning.add(found, len(delta.token_ids), answering=self._reader.answering)
        events = self._output.add(found[0], rows)
        for parts in found[1:]:
            events += self._output.add(parts)
        return events

    def _sent(self, events: Iterable[Event]) -> bytes:
        told = []
        for type_, fields in events:
            data = _dumps({"type": type_, "sequence_number": self._num_events, **fields})
            self._num_events += 1
            told.append(b"event: %b\ndata: %b\n\n" % (type_.encode(), data))
        return b"".join(told)

    def _final(self, status: ResponseStatus, usage: Usage, timings: Timings) -> Response:
        response = self._response(status, self._output.items)
        response.incomplete_details = IncompleteDetails() if status == "incomplete" else None
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._reasoning.num),
            total_tokens=usage.total_tokens,
        )
        if self._head.with_timings:
            response.inferloop = timings
        return response

    def _response(self, status: ResponseStatus, output: list[OutputItem]) -> Response:
        """The object with all that it repeats of how it was asked for."""
        head, request, sampling = self._head, self._call.request, self._call.sampling
        asked = request.text.format if request.text is not None else None
        return Response(
            id=head.id,
            created_at=head.created,
            status=status,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=head.model,
            output=output,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            prompt_cache_key=request.prompt_cache_key,
            safety_identifier=request.safety_identifier,
            temperature=sampling.temperature,
            text=ResponseText(format=asked or TextFormat(type="text")),
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_logprobs=request.top_logprobs or 0,
            top_p=sampling.top_p,
            user=request.user,
        )


def _status(finish: Finish) -> Literal["completed", "incomplete"]:
    return "incomplete" if finish == "length" else "completed"

"""/v1/responses: how an answer looks, whole or as typed events.

A stream's events are numbered from 0. Each says in its `event:` line and in its `type` what it is; the last one is
response.completed, response.incomplete or response.failed, and no [DONE] follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from inferloop.backends.protocols import Delta
from inferloop.core.ids import new_id
from inferloop.core.request import Sampling
from inferloop.serve.errors import error_object
from inferloop.serve.replies import ChatLogprob, Finish, Timings, Usage
from inferloop.serve.responses.replies import (
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseStatus,
    ResponseText,
    ResponseUsage,
)
from inferloop.serve.responses.wire import ResponseCall, ResponsesRequest, TextFormat
from inferloop.serve.sse import AnswerHead
from inferloop.serve.tokens import chat_logprobs

_dumps = msgspec.json.encode


class ResponseEncoder:
    """See serve.sse.Encoder; there is one choice, index 0."""

    def __init__(self, head: AnswerHead) -> None:
        assert isinstance(head.call, ResponseCall)
        self._head, self._request, self._sampling = head, head.call.request, head.call.sampling
        self._message_id = new_id("msg_")
        self._at_part = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        self._begun = False
        self._num_events = 0

    def opening(self, first: Delta) -> bytes:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunk(self, index: int, delta: Delta) -> bytes:
        if not (delta.text or delta.logprobs is not None or (self._head.with_timings and delta.token_ids)):
            return b""
        rows = self._add(delta)
        fields: dict[str, Any] = {**self._at_part, "delta": delta.text, "logprobs": rows}
        if self._head.with_timings:
            fields["inferloop"] = Timings(num_tokens=len(delta.token_ids))
        return self._beginning() + self._event("response.output_text.delta", **fields)

    def ended(self, index: int, finish: Finish) -> bytes:
        raise AssertionError("a response has one choice")

    def closing(self, index: int, finish: Finish, usage: Usage, timings: Timings) -> bytes:
        status = _status(finish)
        beginning, message = self._beginning(), self._message(status)
        [part] = message.content
        return b"".join(
            (
                beginning,
                self._event("response.output_text.done", **self._at_part, text=part.text, logprobs=part.logprobs),
                self._event("response.content_part.done", **self._at_part, part=part),
                self._event("response.output_item.done", output_index=0, item=message),
                self._event(f"response.{status}", response=self._final(finish, usage, timings)),
            )
        )

    def broken(self, error: BaseException) -> bytes:
        told = msgspec.json.decode(error_object(error))["error"]
        ours = told["type"] == "server_error"
        response = self._response("failed", [self._message("incomplete")] if self._begun else [])
        response.error = ResponseError(code="server_error" if ours else "invalid_prompt", message=told["message"])
        return self._event("response.failed", response=response)

    def collect(self, index: int, delta: Delta) -> None:
        self._add(delta)

    def body(self, finishes: Sequence[Finish], usage: Usage, timings: Timings) -> bytes:
        return _dumps(self._final(finishes[0], usage, timings))

    def _add(self, delta: Delta) -> list[ChatLogprob]:
        """Keep what `delta` brings; its log-probabilities."""
        self._texts.append(delta.text)
        if delta.logprobs is None:
            return []
        rows = chat_logprobs(self._head.token_bytes, delta.token_ids, delta.logprobs)
        self._logprobs += rows
        return rows

    def _beginning(self) -> bytes:
        """The message's first events, once."""
        if self._begun:
            return b""
        self._begun = True
        empty = OutputMessage(id=self._message_id, status="in_progress", content=[])
        return self._event("response.output_item.added", output_index=0, item=empty) + self._event(
            "response.content_part.added", **self._at_part, part=OutputText(text="")
        )

    def _message(self, status: ItemStatus) -> OutputMessage:
        part = OutputText(text="".join(self._texts), logprobs=self._logprobs)
        return OutputMessage(id=self._message_id, status=status, content=[part])

    def _event(self, type_: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = _dumps({"type": type_, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (type_.encode(), data)

    def _final(self, finish: Finish, usage: Usage, timings: Timings) -> Response:
        status = _status(finish)
        response = self._response(status, [self._message(status)])
        response.incomplete_details = IncompleteDetails() if status == "incomplete" else None
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=usage.total_tokens,
        )
        if self._head.with_timings:
            response.inferloop = timings
        return response

    def _response(self, status: ResponseStatus, output: list[OutputMessage]) -> Response:
        return _answer_to(self._request, self._sampling, self._head, status, output)


def _answer_to(
    request: ResponsesRequest,
    sampling: Sampling,
    head: AnswerHead,
    status: ResponseStatus,
    output: list[OutputMessage],
) -> Response:
    """The object with all that it repeats of how it was asked for."""
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
        tools=[],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        user=request.user,
    )


def _status(finish: Finish) -> Literal["completed", "incomplete"]:
    return "incomplete" if finish == "length" else "completed"

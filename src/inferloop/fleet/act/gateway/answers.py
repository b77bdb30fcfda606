"""What the gateway says itself: OpenAI error objects, as a response and as the last event of a broken stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 405: "invalid_request_error"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)


def _error_object(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_answer(
    status: int, message: str, code: str, *, retry_after_s: int | None = None, param: str | None = None
) -> Answer:
    headers: RawHeaders = [(b"content-type", b"application/json")]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    return Answer(status, msgspec.json.encode(_error_object(status, message, code, param)), tuple(headers))


def error_event(message: str, code: str, number: int | None = None) -> bytes:
    """One SSE event; the OpenAI clients raise on a `data:` object that has `error`. With a `number` it is also the
    typed event of that number in a stream of /v1/responses, for clients that look at types alone."""
    data = _error_object(502, message, code)
    if number is None:
        return b"data: " + msgspec.json.encode(data) + b"\n\n"
    typed = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": number}
    return b"event: error\ndata: " + msgspec.json.encode(typed | data) + b"\n\n"


async def send_answer(send: Send, answer: Answer, extra: RawHeaders) -> None:
    headers = [*answer.headers, *extra, (b"content-length", str(len(answer.body)).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})

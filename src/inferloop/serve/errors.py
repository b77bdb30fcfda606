"""Our typed errors as OpenAI error objects."""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Iterable

import msgspec

from inferloop.core.errors import EngineError, InferloopError, OverloadedError, RequestError

NOT_FAULTS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""All else that is raised is a fault to answer for: a panic of native code is no Exception, yet it is one request that
failed."""
_MAX_CHARS = 2000
"""Of a message, which says what is wrong at its beginning."""
log = logging.getLogger("inferloop.serve")


class ModelNotFoundError(RequestError):
    status = 404

    def __init__(self, asked: str, served: str, adapters: Iterable[str] = ()) -> None:
        names = ", ".join([repr(served), *map(repr, sorted(adapters))])
        super().__init__(
            f"The model {asked!r} does not exist; this server serves {names}", param="model", code="model_not_found"
        )


class BodyTooLargeError(RequestError):
    status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body exceeds {limit_bytes} bytes", code="request_too_large")


class HeadTooLargeError(RequestError):
    status = 431

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request's line and headers exceed {limit_bytes} bytes", code="headers_too_large")


class NotFoundError(RequestError):
    status = 404


class ConflictError(RequestError):
    status = 409


class NoRoomError(RequestError):
    status = 507

    def __init__(self, message: str) -> None:
        super().__init__(message, code="no_room")


class MethodError(RequestError):
    status = 405


class UnauthorizedError(RequestError):
    """No API key, or (`is_wrong`) one that is not known."""

    status = 401

    def __init__(self, message: str, *, is_wrong: bool = False) -> None:
        self.challenge = 'Bearer realm="inferloop"' + (', error="invalid_token"' if is_wrong else "")  # RFC 6750
        super().__init__(message, code="invalid_api_key")


class CutShortError(InferloopError):
    """The request was ended before its answer was complete, and not by a fault. `code` says why."""

    def __init__(self, message: str, *, status: int, code: str) -> None:
        self.status, self.code = status, code
        super().__init__(message)


def cut_short(why: str) -> InferloopError:
    """What a client is told whose request was interrupted for `why`."""
    if why == "timeout":
        # 408 and not 504: it is no fault of this replica, which a gateway would otherwise stop trusting
        return CutShortError("the request took longer than it was allowed to", status=408, code="timeout")
    if why == "cancelled":
        return CutShortError("the request was cancelled", status=499, code="cancelled")
    if why == "unread":
        return CutShortError("the client did not read the answer as fast as it came", status=499, code="unread")
    return OverloadedError("this replica is shutting down", reason="stopping")


def error_status(error: BaseException) -> int:
    return error.status if isinstance(error, RequestError | OverloadedError | EngineError | CutShortError) else 500


def error_class(error: BaseException) -> str:
    """The class that events and load generators count by."""
    if isinstance(error, RequestError):
        return "http_4xx"
    return "overloaded" if isinstance(error, OverloadedError) else "engine"


def error_object(error: BaseException) -> bytes:
    """`{"error": {message, type, param, code}}`. The text of errors that are not ours stays inside (it may quote the
    prompt). What it quotes of the request may be long, and hold halves of characters."""
    param: str | None = None
    if isinstance(error, RequestError):
        message, type_, param, code = error.message, "invalid_request_error", error.param, error.code
    elif isinstance(error, OverloadedError):
        message, type_, code = str(error), "server_error", "overloaded"
    elif isinstance(error, EngineError):
        message, type_, code = str(error), "server_error", "engine_error"
    elif isinstance(error, CutShortError):
        message, type_, code = str(error), "request_ended_error", error.code
    else:
        message, type_, code = "The server failed while answering this request", "server_error", "internal_error"
    told = {"message": _quotable(message), "type": type_, "param": param and _quotable(param), "code": code}
    return msgspec.json.encode({"error": told})


def _quotable(text: str) -> str:
    short = text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
    return short.encode("utf-8", "replace").decode()


def error_headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    if isinstance(error, CutShortError | RequestError):
        # clients of OpenAI's send anew after a 408, 409 and all from 500 on
        challenge = [(b"www-authenticate", error.challenge.encode())] if isinstance(error, UnauthorizedError) else []
        return [(b"x-should-retry", b"false"), *challenge]
    if isinstance(error, OverloadedError):
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
    return []


def log_bug(request_id: str, error: BaseException) -> None:
    """Where an unexpected exception came from, without its text, which may quote the prompt."""
    trace = "".join(traceback.format_tb(error.__traceback__))
    log.error("request %s failed: %s\n%s", request_id, type(error).__name__, trace)

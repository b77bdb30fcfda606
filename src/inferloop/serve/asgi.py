"""The little ASGI that the endpoints share: reading a bounded body, sending, noticing that the client left."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferloop.core.ids import accept_request_id
from inferloop.serve.errors import NOT_FAULTS, BodyTooLargeError, error_headers, error_object, error_status, log_bug

REQUEST_ID = "inferloop.request_id"
"""Scope key under which the envelope puts the id of the request."""
SEND_PART = "inferloop.send_part"
"""Scope key of a shorter way to send a part of a body, without the layers that only look at how a response begins."""
DROP = "inferloop.drop"
"""Scope key of what closes the connection at once, without waiting for the client to read what was written."""
ANSWERING = "inferloop.answering"
"""Scope key of {"identity": digest}: whoever answers with another identity than the server's own puts it there."""
JSON_HEADERS = [(b"content-type", b"application/json")]


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """Raises BodyTooLargeError as soon as the limit is passed, ClientGoneError."""
    parts: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise BodyTooLargeError(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def start(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def send_body(send: Send, body: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    length = (b"content-length", str(len(body)).encode())
    await start(send, status, [*JSON_HEADERS, length, *headers])
    await send_body(send, body)


async def send_error(send: Send, error: BaseException) -> None:
    """An OpenAI error object with the error's status."""
    await send_json(send, error_status(error), error_object(error), error_headers(error))


class Outermost:
    """Around the whole application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SEND_PART] = send
        await self._app(scope, receive, send)


class Envelope:
    """Around every endpoint: each response, that of a bug too, carries x-request-id, the replica's name and the digest
    of its serving identity."""

    def __init__(self, app: ASGIApp, *, replica: str, identity_digest: str) -> None:
        self._app = app
        self._replica = (b"x-inferloop-replica", replica.encode("latin-1", "replace"))
        self._identity = identity_digest.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = accept_request_id(Headers(scope=scope).get("x-request-id"))
        scope[REQUEST_ID] = request_id
        answering = scope[ANSWERING] = {"identity": self._identity}
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                identity = (b"x-inferloop-identity", answering["identity"])
                extra = ((b"x-request-id", request_id.encode()), self._replica, identity)
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except NOT_FAULTS:
            raise
        except BaseException as error:
            log_bug(request_id, error)
            if not started:
                await send_error(send_with_headers, error)

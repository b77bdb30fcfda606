"""Hangs up on a caller who takes nothing of an answer: it would hold a place at a replica for nobody."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferloop.serve.asgi import DROP
from inferloop.serve.stream import STALL_S


class DropUnread:
    """Around an application behind serve.http.HttpProtocol. What `send` has to wait for is that the caller reads: when
    it has waited for `stall_s`, the connection is closed, and the application is told that the caller has left."""

    def __init__(self, app: ASGIApp, stall_s: float = STALL_S) -> None:
        self._app, self._stall_s = app, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        waits_since: float | None = None
        timer: asyncio.TimerHandle

        def look() -> None:
            """One timer for all that is sent: most of it waits for nothing."""
            nonlocal timer
            now = loop.time()
            if waits_since is not None and now - waits_since >= self._stall_s:
                scope[DROP]()
                return
            timer = loop.call_at((now if waits_since is None else waits_since) + self._stall_s, look)

        async def send_watched(message: Message) -> None:
            nonlocal waits_since
            waits_since = loop.time()
            try:
                await send(message)
            finally:
                waits_since = None

        timer = loop.call_later(self._stall_s, look)
        try:
            await self._app(scope, receive, send_watched)
        finally:
            timer.cancel()

"""Turns the caller's disconnect into the end of the work for it, also while nothing moves in either direction."""

from __future__ import annotations

import asyncio
from types import TracebackType

from inferloop.fleet.act.gateway.answers import Receive


class UntilDisconnect:
    """`async with` around the work of one request whose body has been read. When the caller goes away, what is inside
    is cancelled where it waits, the block ends quietly and `disconnected` is true. A cancellation from elsewhere
    passes through. Built like asyncio.timeout."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._task: asyncio.Task[object] | None = None
        self._num_cancelling = 0
        self.disconnected = False

    async def __aenter__(self) -> UntilDisconnect:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._num_cancelling = self._task.cancelling()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        assert self._task is not None
        self.disconnected = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> bool:
        assert self._watcher is not None and self._task is not None
        self._watcher.cancel()
        if not self.disconnected:
            return False
        return self._task.uncancel() <= self._num_cancelling and kind is asyncio.CancelledError

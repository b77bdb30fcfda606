"""The database from the event loop: one thread does everything in order, and answers are written together."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from inferloop.serve.batch.records import Answer
from inferloop.serve.batch.store import Store

P = ParamSpec("P")
R = TypeVar("R")


class Desk:
    """Lives on one event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inferloop-batch")
        self._waiting: list[Answer] = []
        self._next: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    async def ask(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """A method of the store, after all that was asked before. Cancelled, it is done all the same."""
        loop = asyncio.get_running_loop()
        asked = loop.run_in_executor(self._thread, functools.partial(method, *args, **kwargs))
        return await asyncio.shield(asked)

    async def record(self, answer: Answer) -> None:
        """Returns when the answer is on disk. Those that come during a transaction share the next one."""
        self._waiting.append(answer)
        if self._next is None:
            self._next = asyncio.create_task(self._transaction())
            self._next.add_done_callback(_look)
        await asyncio.shield(self._next)  # who waits may be cancelled; the others' answers must not be

    async def settle(self) -> None:
        """Returns when all answers given to `record` so far are on disk, or have failed."""
        if self._next is not None:
            await asyncio.wait([self._next])
        async with self._writing:
            pass

    async def _transaction(self) -> None:
        async with self._writing:
            answers, self._waiting, self._next = self._waiting, [], None
            await self.ask(self.store.record, answers)

    async def close(self) -> None:
        await self.settle()
        await asyncio.to_thread(self._thread.shutdown)
        self.store.close()


def _look(task: asyncio.Task[None]) -> None:
    """A failure that nobody waits for any more is no warning: its rows run again."""
    if not task.cancelled():
        task.exception()

"""A limit on waiting for others that does not hold against them how long our own loop stood still."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_ROUNDS = 16
"""Of the loop; opening a connection takes four once the kernel has it."""


@contextlib.asynccontextmanager
async def within(limit_s: float) -> AsyncIterator[None]:
    """As asyncio.timeout, but what has come by the time the loop gets to look is taken first, however late it looks:
    on a starved machine a connection may long be there. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    handle: asyncio.Handle
    async with asyncio.timeout(None) as limit:

        def expire(rounds: int) -> None:
            nonlocal handle
            if rounds:
                handle = loop.call_soon(expire, rounds - 1)
            else:
                limit.reschedule(loop.time())

        handle = loop.call_later(limit_s, expire, _ROUNDS)
        try:
            yield
        finally:
            handle.cancel()

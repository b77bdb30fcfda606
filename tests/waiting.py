"""Waiting for what another task, thread or process does. The limit is generous: a starved machine is no failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from inferloop.backends.http import HttpClient

PATIENCE_S = 60.0


async def until(holds: Callable[[], object]) -> None:
    """Let other tasks run until `holds()` is true. TimeoutError after `PATIENCE_S`."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110  what is awaited has no event of its own
            await asyncio.sleep(0.005)


async def until_async(holds: Callable[[], Awaitable[object]]) -> None:
    """As `until`, where one has to await to know."""
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():  # noqa: ASYNC110  as above
            await asyncio.sleep(0.005)


def wait_until(holds: Callable[[], object]) -> None:
    """Block this thread until `holds()` is true. TimeoutError after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("it never came to hold")
        time.sleep(0.005)


async def until_idle(client: HttpClient) -> dict[str, Any]:
    """Until the server answers nobody any more, and computes nothing; what its /health/progress tells then."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            told: dict[str, Any] = await client.get_json("/health/progress", timeout_s=PATIENCE_S)
            if told["running"] == told["waiting"] == told["in_flight"] == 0:
                return told
            await asyncio.sleep(0.005)


def skip(seconds: float) -> None:
    """Let the running loop's clock jump: what waits on it for no longer, a timeout or a sleep, is due now. So limits in
    tests can be long enough that none of them passes by itself, however slow the machine is. Not on uvloop."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]

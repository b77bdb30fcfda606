"""Targets that stay up while another is measured: what they cost it, and how that is kept from it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

_WATCH_S = 1.0
_LOOK_S = 0.2
_AT_REST = 0.05
"""Of a core: a server that waits for requests takes less, one that computes or spins takes more."""


class Resident(Protocol):
    """The processes of a target that was started here."""

    def cpu_s(self) -> float:
        """Processor time used so far, in all of them."""
        ...

    def suspend(self) -> None: ...

    def resume(self) -> None: ...


async def idle_share(resident: Resident, watch_s: float = _WATCH_S) -> float:
    """How much of one core it takes while nothing is asked of it."""
    begin, used = time.monotonic(), resident.cpu_s()
    await asyncio.sleep(watch_s)
    return max(0.0, resident.cpu_s() - used) / (time.monotonic() - begin)


def is_restless(share: float) -> bool:
    """Whether an idle target of this share would take time from one that is measured."""
    return share > _AT_REST


async def at_rest(resident: Resident, timeout_s: float, look_s: float = _LOOK_S) -> bool:
    """Wait until it computes nothing any more; False when it still does after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while is_restless(await idle_share(resident, look_s)):
        if time.monotonic() >= deadline:
            return False
    return True

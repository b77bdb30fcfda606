"""Whether this machine had other work when the run began: a frequent reason for numbers that nobody can repeat."""

from __future__ import annotations

import asyncio

import psutil

_QUIET_PERCENT = 20.0
_WATCH_S = 0.5


async def busy_percent() -> float:
    """How busy this machine's processors are right now, 0 to 100, watched for half a second."""
    return await asyncio.to_thread(psutil.cpu_percent, _WATCH_S)


def busy_note(percent: float) -> str | None:
    """What to tell of it; None for a quiet machine. `percent` is taken before the run puts any load on the target."""
    if percent <= _QUIET_PERCENT:
        return None
    return (
        f"this machine was {percent:.0f} % busy before the run began; the client ran here, and so did the target if it "
        "is local: measure again when it is quiet"
    )

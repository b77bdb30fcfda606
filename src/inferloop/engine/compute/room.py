"""Whether there is room for the KV memory, asked before it is taken."""

from __future__ import annotations

import psutil

from inferloop.core.errors import EnvironmentLacksError
from inferloop.core.units import human_bytes


def check_room(kv_bytes: int, step_bytes: int = 0) -> None:
    """Main memory is promised freely and the process killed once it is touched. `step_bytes`: what steps over such
    contexts take beside it. Raises EnvironmentLacksError."""
    free = psutil.virtual_memory().available
    if kv_bytes + step_bytes > free:
        beside = f", and steps over it take {human_bytes(step_bytes)} more" if step_bytes else ""
        or_threads = " or --threads" if step_bytes > kv_bytes else ""  # each of which takes its part of them
        raise no_room(
            kv_bytes, f"{human_bytes(free)} are free{beside}", f"Choose less, with --kv-memory-mib{or_threads}."
        )


def no_room(kv_bytes: int, why: str, fix: str = "Choose less, with --kv-memory-mib.") -> EnvironmentLacksError:
    return EnvironmentLacksError(f"no room for {human_bytes(kv_bytes)} of KV memory: {why}", fix=fix)

"""No garbage collection in a window: its pauses of up to hundreds of milliseconds would show as the server's."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_collector(*, off: bool = True) -> Iterator[list[int]]:
    """The block has no automatic collection. With `off` False only what lives already, a plan of many requests, is not
    looked at again and again. The list that is given grows by the length of each collection all the same, in ns: those
    that somebody asked for, or that `off` lets happen."""
    pauses_ns: list[int] = []
    begun_ns = 0

    def watch(phase: str, _: dict[str, int]) -> None:
        nonlocal begun_ns
        if phase == "start":
            begun_ns = time.monotonic_ns()
        elif begun_ns:
            pauses_ns.append(time.monotonic_ns() - begun_ns)

    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    if off:
        gc.disable()
    gc.callbacks.append(watch)
    try:
        yield pauses_ns
    finally:
        gc.callbacks.remove(watch)
        gc.unfreeze()
        if was_enabled:
            gc.enable()

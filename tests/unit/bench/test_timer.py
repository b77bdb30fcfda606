"""Timers wake at or after their instant, once, and only for the last instant that they were given."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from inferloop.bench.client.timer import KernelTimer, LoopTimer, make_timer

KINDS = (KernelTimer, LoopTimer) if sys.platform == "linux" else (LoopTimer,)
MS = 1_000_000


@pytest.mark.parametrize("kind", KINDS)
async def test_it_wakes_once_for_the_last_instant(kind: type[KernelTimer] | type[LoopTimer]) -> None:
    woken: list[int] = []
    done = asyncio.Event()

    def wake() -> None:
        woken.append(time.monotonic_ns())
        done.set()

    timer = kind(asyncio.get_running_loop(), wake)
    try:
        start = time.monotonic_ns()
        timer.arm(start + 3_600_000 * MS)
        timer.arm(start + 20 * MS)
        await asyncio.wait_for(done.wait(), 30)
        assert woken[0] >= start + 20 * MS - (MS if kind is LoopTimer else 0)
        done.clear()
        timer.arm(start)  # has passed
        await asyncio.wait_for(done.wait(), 30)
        timer.arm(time.monotonic_ns() + 10 * MS)
        timer.arm(None)
        await asyncio.sleep(0.05)
        assert len(woken) == 2
    finally:
        timer.close()
        timer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")
async def test_the_kernels_timer_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timer = make_timer(loop, lambda: None)
    timer.close()
    assert isinstance(timer, KernelTimer)

    def refuse(*_: object) -> None:
        raise OSError("none here")

    monkeypatch.setattr(KernelTimer, "__init__", refuse)
    assert isinstance(make_timer(loop, lambda: None), LoopTimer)

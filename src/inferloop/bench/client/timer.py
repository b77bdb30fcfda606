"""Waking at an instant. The event loop's own timers come in whole milliseconds; Linux has better ones (timerfd(2))."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from inferloop.core.units import NS_PER_S

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE = 1


class Timer(Protocol):
    """Calls back once, at or soon after an instant of the monotonic clock; a timer of the loop may come early."""

    def arm(self, deadline_ns: int | None) -> None:
        """Instead of any earlier deadline. None: not at all."""
        ...

    def close(self) -> None: ...


def make_timer(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Timer:
    """The best there is on this system."""
    try:
        return KernelTimer(loop, callback)
    except (OSError, AttributeError, NotImplementedError):
        return LoopTimer(loop, callback)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class KernelTimer:
    """A timerfd that the loop reads. Raises OSError or AttributeError where the system has none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime: Any = libc.timerfd_settime
        self._fd: int = libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _Itimerspec()
        self._value, self._address = self._spec.it_value, ctypes.byref(self._spec)
        self._loop, self._callback = loop, callback
        loop.add_reader(self._fd, self._fired)

    def arm(self, deadline_ns: int | None) -> None:
        # An instant of zero would disarm it; one that has passed fires at once.
        self._value.tv_sec, self._value.tv_nsec = (0, 0) if deadline_ns is None else divmod(deadline_ns, NS_PER_S)
        if self._settime(self._fd, _ABSOLUTE, self._address, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # armed anew since the loop saw it
            os.read(self._fd, 8)
            self._callback()


class LoopTimer:
    """The loop's own `call_at`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, deadline_ns: int | None) -> None:
        self.close()
        if deadline_ns is not None:
            delay_s = max(0.0, (deadline_ns - time.monotonic_ns()) / NS_PER_S)
            self._handle = self._loop.call_at(self._loop.time() + delay_s, self._callback)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

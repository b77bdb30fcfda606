"""Being woken at once although every core is busy, as they are when the target runs on the machine of the load."""

from __future__ import annotations

import contextlib
import os

_NICE = -15


def go_first() -> None:
    """Put this process ahead of ordinary ones where that is allowed: least real-time priority, else a nice value.

    A sender sleeps nearly always and works for microseconds. At ordinary priority it may have to wait for the end of
    another's slice, tens of milliseconds, which would show as late sends and as the latency of whoever it listens to.
    The kernel keeps a share of each core for the others, so that a sender which is busy all the time, and voids its
    numbers, starves nobody. A process that was given a priority keeps it.
    """
    if priority() != "normal":
        return
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def priority() -> str:
    """Of this process: real-time, nice and its value, or normal."""
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
            return "real-time"
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return f"nice {nice}" if nice else "normal"

"""One instant on both clocks of a host, and how well its wall clock is known."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from inferloop.core.clock import Clock

_TIMEX_BYTES = 208
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAXERROR_AT = 24
"""Of `struct timex` on 64-bit Linux: modes (int, padded), offset, freq, maxerror (longs)."""
_TIME_ERROR = 5


@dataclass(frozen=True, slots=True)
class Anchor:
    """`wall_ns` was read at `t_ns` on the monotonic clock, give or take `uncertainty_ns`."""

    t_ns: int
    wall_ns: int
    uncertainty_ns: int


def read_anchor(clock: Clock) -> Anchor:
    """The wall clock read between two readings of the monotonic one."""
    before = clock.now_ns()
    wall = clock.wall_ns()
    after = clock.now_ns()
    return Anchor((before + after) // 2, wall, (after - before + 1) // 2)


def wall_error_ns() -> int | None:
    """How far the kernel thinks this host's wall clock may be off (adjtimex maxerror). None where it does not tell, or
    where nothing keeps the clock synchronous."""
    try:
        buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if state < 0 or state == _TIME_ERROR or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    return int.from_bytes(buffer.raw[_MAXERROR_AT : _MAXERROR_AT + 8], "little", signed=True) * 1000


def boot_id() -> str | None:
    """Names one boot of one kernel, and so one monotonic clock. None where the system has no such name."""
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None

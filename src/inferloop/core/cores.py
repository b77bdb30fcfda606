"""How many cores there are to compute on."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Those that this process may run on, or as many as the quota of its control group (v2, then v1) keeps busy,
    rounded up: threads beyond a quota are stopped in the middle of a step, and all others wait for them."""
    cores = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = (int(word) for name in names for word in (root / name).read_text().split())
        except (OSError, ValueError):  # not there, or "max"
            continue
        if quota > 0 and period > 0:
            return min(cores, -(-quota // period))
    return cores

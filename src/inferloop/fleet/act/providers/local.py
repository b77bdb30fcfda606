"""This machine: replicas as processes beside us."""

from __future__ import annotations

from pathlib import Path

import psutil

from inferloop.backends.protocols import LaunchSpec
from inferloop.core.clock import Clock
from inferloop.core.cores import usable_cores
from inferloop.fleet.act.process import ReplicaProcess
from inferloop.fleet.decide.fit import MachineCapacity


class LocalProvider:
    """Launches on this machine; each replica's output goes to `log_dir`/<replica id>.log."""

    def __init__(self, log_dir: Path, clock: Clock) -> None:
        self._log_dir, self._clock = log_dir, clock

    def log_path(self, replica_id: str) -> Path:
        return self._log_dir / f"{replica_id}.log"

    async def launch(self, spec: LaunchSpec, replica_id: str) -> ReplicaProcess:
        """A started process, not yet ready. Raises LaunchError."""
        return await ReplicaProcess.start(
            spec, log_path=self.log_path(replica_id), replica_id=replica_id, clock=self._clock
        )


def machine_capacity() -> MachineCapacity:
    """What is free now: available memory, capped by the control group's limit, and the cores we may run on."""
    return MachineCapacity(min(psutil.virtual_memory().available, _cgroup_left()), usable_cores())


def _cgroup_left(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the control group (v2, then v1) still allows; very many when there is no limit to be read."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (root / limit_name).read_text().strip()
            if limit != "max":
                return max(0, int(limit) - int((root / used_name).read_text()))
        except (OSError, ValueError):
            continue
    return 1 << 62

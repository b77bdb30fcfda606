"""How many of the needed replicas one machine can carry."""

from __future__ import annotations

from dataclasses import dataclass

from inferloop.core.units import human_bytes


@dataclass(frozen=True, slots=True)
class ReplicaNeeds:
    """What one replica takes: resident bytes (weights, KV, runtime) and compute threads."""

    memory_bytes: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """What the machine has to give: available bytes, and cores."""

    memory_bytes: int
    num_cores: int


@dataclass(frozen=True, slots=True)
class FitDecision:
    """Start `start` here; `missing` more are needed elsewhere. `reasons` says, in words, what ran out."""

    start: int
    missing: int
    reasons: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.missing == 0


def fit(needed: int, per_replica: ReplicaNeeds, machine: MachineCapacity) -> FitDecision:
    """Start as many of `needed` as memory and cores carry.

    Memory is hard: a replica that does not fit would be killed. Cores are softer: with fewer cores than one replica
    wants, one still runs, only slower, so it is started and the shortage said. Raises ValueError for counts below 0
    or needs that are not positive.
    """
    if needed < 0 or per_replica.memory_bytes <= 0 or per_replica.num_threads <= 0:
        raise ValueError(f"need counts >= 0 and positive needs, got {needed} of {per_replica}")
    by_memory = max(0, machine.memory_bytes) // per_replica.memory_bytes
    by_cores = machine.num_cores // per_replica.num_threads
    start = min(needed, by_memory, max(1, by_cores))
    reasons = []
    if by_memory < needed:
        reasons.append(
            f"memory: {needed} x {human_bytes(per_replica.memory_bytes)} needed, "
            f"{human_bytes(machine.memory_bytes)} available, room for {by_memory}"
        )
    if by_cores < needed:
        reasons.append(
            f"cores: {needed} x {per_replica.num_threads} threads needed, "
            f"{machine.num_cores} cores, room for {by_cores}"
        )
    return FitDecision(start, needed - start, tuple(reasons))

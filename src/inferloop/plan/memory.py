"""Whether one replica fits in memory: weights, KV cache and overhead, each with its own format.

Weights and KV cache are stored in formats of their own; neither is derived from the other. Every number follows from
the architecture (core.shape); where an engine reports what it really took, use that instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from inferloop.core.errors import UsageError, nearest
from inferloop.core.shape import BYTES_PER_ELEMENT, ModelShape
from inferloop.core.units import human_bytes

DEFAULT_UTILIZATION = 0.9
DEFAULT_OVERHEAD_BYTES = 512 * 1024 * 1024
"""Runtime, activations of a small step, fragmentation; an engine's own figure is better."""


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Bytes of one replica, on each of its devices. `num_kv_tokens` is how many tokens of KV cache the remaining room
    holds."""

    weight_bytes: int
    kv_bytes_per_token: int
    overhead_bytes: int
    usable_bytes: int
    num_kv_tokens: int
    num_sequences: int
    """Sequences of the full length asked for that fit at once."""
    fits: bool
    reason: str


def replica_memory(
    shape: ModelShape,
    *,
    memory_bytes: int,
    sequence_tokens: int,
    weight_format: str = "bf16",
    kv_format: str = "bf16",
    weight_bytes: int | None = None,
    kv_bytes_per_token: float | None = None,
    kv_memory_bytes: int = 0,
    utilization: float = DEFAULT_UTILIZATION,
    overhead_bytes: int = DEFAULT_OVERHEAD_BYTES,
    num_ranks: int = 1,
) -> ReplicaMemory:
    """Of a replica that must hold at least one sequence of `sequence_tokens` (input plus output).

    `weight_bytes` is the measured size of the files and wins over `weight_format`, because mixed files follow no single
    format; `kv_bytes_per_token`, as an engine lays keys and values out, wins over `kv_format`. `kv_memory_bytes` is
    what the engine is told to set aside for them, if that is more than one sequence needs. Raises UsageError for an
    unknown format or a number that means nothing.

    `num_ranks` devices of `memory_bytes` each may share the replica by tensor parallelism. The fullest decides: it has
    an even part of the weights, and keys and values of as many heads as fall to one where they cannot be dealt out more
    evenly; ranks beyond the number of KV heads keep some of them once more.
    """
    for name, value in (("weights", weight_format), ("kv", kv_format)):
        if value not in BYTES_PER_ELEMENT:
            close = nearest(value, BYTES_PER_ELEMENT)
            hint = f"; did you mean {close}?" if close else ""
            raise UsageError(f"{name} format {value!r} is unknown{hint}")
    if (
        memory_bytes <= 0
        or sequence_tokens <= 0
        or not 0 < utilization <= 1
        or min(overhead_bytes, kv_memory_bytes) < 0
    ):
        raise UsageError("memory and sequence length must be above 0, utilization within 0..1")
    if num_ranks < 1:
        raise UsageError(f"a replica has 1 rank or more, not {num_ranks}")
    weights = math.ceil((shape.weight_bytes(weight_format) if weight_bytes is None else weight_bytes) / num_ranks)
    per_token = shape.kv_bytes_per_token(kv_format) if kv_bytes_per_token is None else kv_bytes_per_token
    per_token = math.ceil(per_token * math.ceil(max(shape.kv_heads) / num_ranks) / max(shape.kv_heads))
    usable = int(memory_bytes * utilization)
    room = usable - weights - overhead_bytes
    num_kv_tokens = max(0, room // per_token)
    num_sequences = num_kv_tokens // sequence_tokens
    of_sequence, of_engine = sequence_tokens * per_token, math.ceil(kv_memory_bytes / num_ranks)
    told_kv = "KV memory" if of_engine > of_sequence else "KV of one sequence"
    short = weights + overhead_bytes + max(of_sequence, of_engine) - usable
    reason = (
        f"weights {human_bytes(weights)} + overhead {human_bytes(overhead_bytes)} + {told_kv} "
        f"{human_bytes(max(of_sequence, of_engine))} in {human_bytes(usable)} usable"
    )
    if short > 0:
        return ReplicaMemory(
            weights, per_token, overhead_bytes, usable, num_kv_tokens, 0, False, f"{reason}: {human_bytes(short)} short"
        )
    return ReplicaMemory(weights, per_token, overhead_bytes, usable, num_kv_tokens, num_sequences, True, reason)

"""The three kinds of service: who consumes the result, and the one number each is to be good at.

Chat is read by a person as it comes; an agent's answer counts when the whole job is done; batch output is written
somewhere and used later.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferloop.contract.workload import Archetype


@dataclass(frozen=True, slots=True)
class Profile:
    """`needs`: groups of latency metrics; one of each group must have an objective, or the promise misses its point.

    `typical_p95_ms` are starting values for a service that does not know better yet.
    """

    name: Archetype
    consumer: str
    figure_of_merit: str
    needs: tuple[tuple[str, ...], ...]
    needs_cost: bool
    shares_prefixes: bool
    typical_p95_ms: tuple[tuple[str, float], ...]


PROFILES: dict[str, Profile] = {
    "chat": Profile(
        name="chat",
        consumer="a person who reads every token as it comes",
        figure_of_merit="output tokens/s per user at the SLO",
        needs=(("ttft_ms",), ("tpot_ms", "itl_ms")),
        needs_cost=False,
        shares_prefixes=False,
        typical_p95_ms=(("ttft_ms", 1000.0), ("tpot_ms", 100.0)),
    ),
    "agent": Profile(
        name="agent",
        consumer="a person or a program that waits for the finished job",
        figure_of_merit="task success, and completion time (TTLT through the whole tool loop)",
        needs=(("ttlt_ms",),),
        needs_cost=False,
        shares_prefixes=True,
        typical_p95_ms=(("ttlt_ms", 30_000.0),),
    ),
    "batch": Profile(
        name="batch",
        consumer="a table or an index that is read later",
        figure_of_merit="million tokens per dollar",
        needs=(),
        needs_cost=True,
        shares_prefixes=False,
        typical_p95_ms=(("ttlt_ms", 600_000.0),),
    ),
}

"""Which replica takes a request: the one with the fewest in flight among those that may be chosen.

Counting in flight has one owner, the Router; every route takes a Lease and gives it back, so that load can neither be
missed nor leak. Loads are compared among eligible replicas only: a dead one with zero in flight must not win.
Not thread-safe: one owner, one thread.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

Refusal = Literal["no_replica_ready", "saturated"]


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica as the decision sees it."""

    replica_id: str
    in_flight: int
    ready: bool
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """`replica_id` None means refused, and then `refusal` says why. `why` is for the record."""

    replica_id: str | None
    why: str
    refusal: Refusal | None = None


def choose(
    replicas: Iterable[ReplicaLoad],
    rng: random.Random,
    *,
    exclude: Collection[str] = (),
    max_in_flight: int | None = None,
    model: str | None = None,
) -> Choice:
    """Least in flight over ready replicas not in `exclude`, of `model` alone where one is given; ties are broken at
    random, so that idle replicas share.

    `max_in_flight` bounds one replica: when every eligible one is at its bound the request is refused as saturated.
    Mutates `rng` only.
    """
    eligible = [r for r in replicas if r.ready and r.replica_id not in exclude and model in (None, r.model)]
    if not eligible:
        return Choice(None, "none ready", "no_replica_ready")
    least = min(r.in_flight for r in eligible)
    if max_in_flight is not None and least >= max_in_flight:
        return Choice(None, f"all {len(eligible)} at {max_in_flight} in flight", "saturated")
    tied = [r.replica_id for r in eligible if r.in_flight == least]
    chosen = tied[0] if len(tied) == 1 else rng.choice(tied)
    return Choice(chosen, f"least in flight: {least}, tied {len(tied)} of {len(eligible)}")


class Lease:
    """One request's place at one replica. Use as a context manager; releasing twice counts once."""

    __slots__ = ("_held", "_router", "replica_id", "why")

    def __init__(self, router: Router, replica_id: str, why: str) -> None:
        self._router, self.replica_id, self.why = router, replica_id, why
        self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._router._leave(self.replica_id)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Router:
    """The table of who is ready and how many requests each has in flight."""

    def __init__(self, *, seed: int = 0, max_in_flight: int | None = None) -> None:
        self._rng = random.Random(seed)
        self._max_in_flight = max_in_flight
        self._ready: set[str] = set()
        self._in_flight: dict[str, int] = {}
        self._gone: set[str] = set()
        self._models: dict[str, str] = {}

    def assign(self, replica_id: str, model: str) -> None:
        """Say which model a replica has, where a service has several. Stays said until it is forgotten."""
        self._models[replica_id] = model

    def set_ready(self, replica_id: str, ready: bool) -> None:
        """Make a replica (new or known) eligible or not. What it has in flight stays counted."""
        self._in_flight.setdefault(replica_id, 0)
        self._gone.discard(replica_id)
        if ready:
            self._ready.add(replica_id)
        else:
            self._ready.discard(replica_id)

    def forget(self, replica_id: str) -> None:
        """The replica is gone for good; leases still out are counted until they come back."""
        self._ready.discard(replica_id)
        self._models.pop(replica_id, None)
        if replica_id in self._in_flight:
            self._gone.add(replica_id)
            self._drop_if_gone(replica_id)

    def admit(self, *, exclude: Collection[str] = (), model: str | None = None) -> Lease | Choice:
        """A Lease on the chosen replica (of `model`, where one is given), or the refusing Choice."""
        choice = choose(self.snapshot(), self._rng, exclude=exclude, max_in_flight=self._max_in_flight, model=model)
        if choice.replica_id is None:
            return choice
        self._in_flight[choice.replica_id] += 1
        return Lease(self, choice.replica_id, choice.why)

    def _leave(self, replica_id: str) -> None:
        self._in_flight[replica_id] -= 1
        assert self._in_flight[replica_id] >= 0, f"{replica_id} left more often than entered"
        self._drop_if_gone(replica_id)

    def _drop_if_gone(self, replica_id: str) -> None:
        if replica_id in self._gone and not self._in_flight[replica_id]:
            self._gone.discard(replica_id)
            del self._in_flight[replica_id]

    def in_flight(self, replica_id: str) -> int:
        return self._in_flight.get(replica_id, 0)

    def snapshot(self) -> tuple[ReplicaLoad, ...]:
        return tuple(
            ReplicaLoad(name, count, name in self._ready, self._models.get(name))
            for name, count in self._in_flight.items()
        )

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def num_ready_of(self, model: str) -> int:
        return sum(self._models.get(name) == model for name in self._ready)

    @property
    def num_in_flight(self) -> int:
        return sum(self._in_flight.values())

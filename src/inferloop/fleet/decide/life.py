"""The life of a replica as values: its states, what can happen to it, and which move is legal.

starting --ready--> ready <--> unready            unready: says so, is silent, or is frozen
any of these three --exited--> restarting         dead, waiting for its backoff
restarting --started--> starting
any of these four --drain--> draining --(idle or out of time: Stop) exited--> stopped
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class EventKind(Enum):
    STARTED = "started"
    READY = "ready"
    NOT_READY = "not_ready"
    PROBE_FAILED = "probe_failed"
    EXITED = "exited"
    PROGRESS = "progress"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Started:
    """The process exists. `pid` is of the engine."""

    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The ready probe succeeded."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """The ready probe was answered, with no: it is alive and knows that it must not be given work now."""

    why: str


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """No, a late or a bad answer to a probe, or a refused connection. Never a 4xx that a caller earned."""

    why: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone, or never came to be."""

    why: str


@dataclass(frozen=True, slots=True)
class Progress:
    """What the replica tells of itself, or (`relayed`) that tokens came out of it: the surest sign of work.
    `alive` False: the process answers, but says that its engine has stopped."""

    step_counter: int | None = None
    num_pending: int = 0
    """Requests waiting or running there."""
    relayed: bool = False
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Drain:
    """This replica is no longer wanted: no new requests, finish what runs, then stop."""

    timeout_s: float


Event = Started | Ready | NotReady | ProbeFailed | Exited | Progress | Drain
KINDS: dict[type[Event], EventKind] = {
    Started: EventKind.STARTED,
    Ready: EventKind.READY,
    NotReady: EventKind.NOT_READY,
    ProbeFailed: EventKind.PROBE_FAILED,
    Exited: EventKind.EXITED,
    Progress: EventKind.PROGRESS,
    Drain: EventKind.DRAIN,
}

S, K = State, EventKind
TRANSITIONS: dict[tuple[State, EventKind], frozenset[State]] = {
    (S.STARTING, K.STARTED): frozenset({S.STARTING}),
    (S.STARTING, K.READY): frozenset({S.READY}),
    (S.STARTING, K.NOT_READY): frozenset({S.STARTING}),
    (S.STARTING, K.PROBE_FAILED): frozenset({S.STARTING}),
    (S.STARTING, K.PROGRESS): frozenset({S.STARTING}),
    (S.STARTING, K.EXITED): frozenset({S.RESTARTING}),
    (S.STARTING, K.DRAIN): frozenset({S.DRAINING}),
    (S.READY, K.READY): frozenset({S.READY}),
    (S.READY, K.NOT_READY): frozenset({S.UNREADY}),
    (S.READY, K.PROBE_FAILED): frozenset({S.READY, S.UNREADY}),
    (S.READY, K.PROGRESS): frozenset({S.READY, S.UNREADY}),
    (S.READY, K.EXITED): frozenset({S.RESTARTING}),
    (S.READY, K.DRAIN): frozenset({S.DRAINING}),
    (S.UNREADY, K.READY): frozenset({S.UNREADY, S.READY}),
    (S.UNREADY, K.NOT_READY): frozenset({S.UNREADY}),
    (S.UNREADY, K.PROBE_FAILED): frozenset({S.UNREADY}),
    (S.UNREADY, K.PROGRESS): frozenset({S.UNREADY, S.READY}),
    (S.UNREADY, K.EXITED): frozenset({S.RESTARTING}),
    (S.UNREADY, K.DRAIN): frozenset({S.DRAINING}),
    (S.DRAINING, K.STARTED): frozenset({S.DRAINING}),
    (S.DRAINING, K.READY): frozenset({S.DRAINING}),
    (S.DRAINING, K.NOT_READY): frozenset({S.DRAINING}),
    (S.DRAINING, K.PROBE_FAILED): frozenset({S.DRAINING}),
    (S.DRAINING, K.PROGRESS): frozenset({S.DRAINING}),
    (S.DRAINING, K.DRAIN): frozenset({S.DRAINING}),
    (S.DRAINING, K.EXITED): frozenset({S.STOPPED}),
    (S.RESTARTING, K.STARTED): frozenset({S.STARTING}),
    (S.RESTARTING, K.DRAIN): frozenset({S.STOPPED}),
}
"""Every legal (state, event) and where it may lead; all else raises IllegalMoveError."""


@dataclass(frozen=True, slots=True)
class Start:
    """Launch it now."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Launch it again after `after_s`."""

    replica_id: str
    after_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process (and any launch that is still to come), with `grace_s` between asking and killing."""

    replica_id: str
    grace_s: float
    why: str


@dataclass(frozen=True, slots=True)
class SetReady:
    """Tell the router whether this replica may be given requests."""

    replica_id: str
    ready: bool
    why: str


Decision = Start | Restart | Stop | SetReady

"""The replica table: events in, decisions out. Owns every replica's state; does nothing itself.

Three questions are kept apart: does the process live (Exited), does it make progress (step counter, tokens relayed),
does it answer (probes). Progress outranks answers: a busy replica answers late and must not be shot for it. And a
process that answers while its step counter stands still in front of a queue is not alive, whatever it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferloop.core.clock import Clock
from inferloop.core.units import NS_PER_S
from inferloop.fleet.decide.life import (
    KINDS,
    TRANSITIONS,
    Decision,
    Drain,
    Event,
    Exited,
    NotReady,
    ProbeFailed,
    Progress,
    Ready,
    Restart,
    SetReady,
    Start,
    Started,
    State,
    Stop,
)


class IllegalMoveError(Exception):
    """An event that cannot happen in this state: a bug of the caller. The table is unchanged."""


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """When a replica is given up, and how fast it comes back.

    Unready after `unready_failures` failed probes in a row that span `unready_after_s` without any sign of life; shot
    after `hang_window_s` of that, or when its step counter stood still for `progress_window_s` in front of work.
    A replica is shot only while fewer than max(1, `max_restarting_fraction` of the wanted ones) are down already:
    when all look bad at once, the cause is more likely shared (overload, the probe itself) and shooting all of them
    is worse. Replicas that died by themselves are always brought back.
    """

    unready_failures: int = 3
    unready_after_s: float = 3.0
    hang_window_s: float = 60.0
    progress_window_s: float = 30.0
    max_restarting_fraction: float = 0.25
    backoff_base_s: float = 0.5
    backoff_cap_s: float = 60.0
    stable_after_s: float = 60.0
    kill_grace_s: float = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A snapshot for people and for tests."""

    replica_id: str
    state: State
    pid: int | None
    num_restarts: int
    why: str


@dataclass(slots=True)
class _Replica:
    replica_id: str
    state: State = State.STARTING
    pid: int | None = None
    num_restarts: int = 0
    num_failures_in_row: int = 0
    num_failed_probes: int = 0
    frozen: bool = False
    stopping: bool = False
    step_counter: int | None = None
    t_step_ns: int = 0
    """When work was last seen to move, or to be absent."""
    t_life_ns: int = 0
    t_ready_ns: int | None = None
    t_drain_end_ns: int = 0
    why: str = "added"

    @property
    def wanted(self) -> bool:
        return self.state not in (State.DRAINING, State.STOPPED)

    @property
    def down(self) -> bool:
        """On its way back to work after a death, or shot and about to die."""
        return (
            self.state is State.RESTARTING or self.stopping or (self.state is State.STARTING and self.num_restarts > 0)
        )


class ReplicaTable:
    """Feed it events with `handle`, and `tick` regularly; carry out what it returns, in order."""

    def __init__(self, policy: ReplicaPolicy, clock: Clock, *, drain_grace_s: float = 30.0) -> None:
        self._policy, self._clock, self._drain_grace_s = policy, clock, drain_grace_s
        self._replicas: dict[str, _Replica] = {}

    def add(self, replica_id: str) -> list[Decision]:
        if replica_id in self._replicas:
            raise IllegalMoveError(f"{replica_id} exists already")
        now_ns = self._clock.now_ns()
        self._replicas[replica_id] = _Replica(replica_id, t_step_ns=now_ns, t_life_ns=now_ns)
        return [Start(replica_id)]

    def remove(self, replica_id: str) -> None:
        """Forget a stopped replica."""
        if self._replicas[replica_id].state is not State.STOPPED:
            raise IllegalMoveError(f"{replica_id} is {self._replicas[replica_id].state.value}, not stopped")
        del self._replicas[replica_id]

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    def view(self) -> tuple[ReplicaView, ...]:
        return tuple(ReplicaView(r.replica_id, r.state, r.pid, r.num_restarts, r.why) for r in self._replicas.values())

    def state(self, replica_id: str) -> State:
        return self._replicas[replica_id].state

    def handle(self, replica_id: str, event: Event) -> list[Decision]:
        """One thing happened to one replica. Raises KeyError for an unknown one, IllegalMoveError for a move that
        TRANSITIONS does not have."""
        replica = self._replicas[replica_id]
        allowed = TRANSITIONS.get((replica.state, KINDS[type(event)]))
        if allowed is None:
            raise IllegalMoveError(f"{replica_id}: {KINDS[type(event)].value} while {replica.state.value}")
        match event:
            case Started():
                decisions = self._on_started(replica, event)
            case Ready():
                decisions = self._on_ready(replica)
            case NotReady():
                decisions = self._on_not_ready(replica, event)
            case ProbeFailed():
                decisions = self._on_probe_failed(replica, event)
            case Progress():
                decisions = self._on_progress(replica, event)
            case Exited():
                decisions = self._on_exited(replica, event)
            case Drain():
                decisions = self._on_drain(replica, event)
        assert replica.state in allowed, f"{event} led to {replica.state}, not in {allowed}"
        return decisions

    def tick(self, in_flight: Mapping[str, int]) -> list[Decision]:
        """Time passed. Draining replicas with nothing in flight, or out of time, are stopped."""
        now_ns = self._clock.now_ns()
        decisions: list[Decision] = []
        for replica in self._replicas.values():
            if replica.state is not State.DRAINING or replica.stopping:
                continue
            num_left = in_flight.get(replica.replica_id, 0)
            if num_left == 0 or now_ns >= replica.t_drain_end_ns:
                replica.stopping = True
                why = "drained" if num_left == 0 else f"out of time with {num_left} in flight"
                decisions.append(
                    Stop(replica.replica_id, self._drain_grace_s if num_left == 0 else self._policy.kill_grace_s, why)
                )
        return decisions

    def _on_started(self, replica: _Replica, event: Started) -> list[Decision]:
        replica.pid = event.pid
        if replica.state is State.RESTARTING:
            replica.state = State.STARTING
            replica.num_restarts += 1
        return []

    def _on_ready(self, replica: _Replica) -> list[Decision]:
        now_ns = self._clock.now_ns()
        replica.t_life_ns, replica.num_failed_probes = now_ns, 0
        if replica.state is State.STARTING:
            replica.t_ready_ns = replica.t_step_ns = now_ns
            return self._enter(replica, State.READY, "ready")
        if replica.state is State.UNREADY and not replica.frozen and not replica.stopping:
            return self._enter(replica, State.READY, "answers again")
        return []

    def _on_not_ready(self, replica: _Replica, event: NotReady) -> list[Decision]:
        replica.t_life_ns, replica.num_failed_probes = self._clock.now_ns(), 0
        return self._enter(replica, State.UNREADY, event.why) if replica.state is State.READY else []

    def _on_probe_failed(self, replica: _Replica, event: ProbeFailed) -> list[Decision]:
        replica.num_failed_probes += 1
        silent_s = (self._clock.now_ns() - replica.t_life_ns) / NS_PER_S
        if replica.state not in (State.READY, State.UNREADY):
            return []
        decisions: list[Decision] = []
        lost = replica.num_failed_probes >= self._policy.unready_failures and silent_s >= self._policy.unready_after_s
        if lost and replica.state is State.READY:
            decisions += self._enter(replica, State.UNREADY, f"{replica.num_failed_probes} probes failed: {event.why}")
        if lost and silent_s >= self._policy.hang_window_s:
            decisions += self._shoot(replica, f"no sign of life for {silent_s:.0f} s: {event.why}")
        return decisions

    def _on_progress(self, replica: _Replica, event: Progress) -> list[Decision]:
        now_ns = self._clock.now_ns()
        replica.t_life_ns, replica.num_failed_probes = now_ns, 0
        moved = event.relayed or (event.step_counter is not None and event.step_counter != replica.step_counter)
        replica.step_counter = replica.step_counter if event.step_counter is None else event.step_counter
        if moved or (event.num_pending == 0 and not event.relayed):
            replica.t_step_ns = now_ns
        if replica.state not in (State.READY, State.UNREADY):
            return []
        still_s = (now_ns - replica.t_step_ns) / NS_PER_S
        still = event.num_pending > 0 and still_s >= self._policy.progress_window_s
        if still or not event.alive:
            replica.frozen = True
            why = f"no step for {still_s:.0f} s with {event.num_pending} requests pending"
            why = why if event.alive else "its engine has stopped"
            decisions = self._enter(replica, State.UNREADY, why) if replica.state is State.READY else []
            return decisions + self._shoot(replica, why)
        if replica.frozen and moved and not replica.stopping:
            replica.frozen = False
            return self._enter(replica, State.READY, "makes progress again")
        return []

    def _on_exited(self, replica: _Replica, event: Exited) -> list[Decision]:
        was_ready = replica.state is State.READY
        unroute: list[Decision] = [SetReady(replica.replica_id, False, event.why)] if was_ready else []
        replica.pid, replica.why = None, event.why
        if replica.state is State.DRAINING:
            replica.state = State.STOPPED
            return []
        now_ns = self._clock.now_ns()
        stable = replica.t_ready_ns is not None and (
            now_ns - replica.t_ready_ns >= self._policy.stable_after_s * NS_PER_S
        )
        replica.num_failures_in_row = 1 if stable else replica.num_failures_in_row + 1
        replica.state = State.RESTARTING
        replica.stopping = replica.frozen = False
        replica.step_counter = replica.t_ready_ns = None
        replica.num_failed_probes = 0
        doublings = min(replica.num_failures_in_row - 1, 60)
        after_s = min(self._policy.backoff_cap_s, self._policy.backoff_base_s * 2.0**doublings)
        return [*unroute, Restart(replica.replica_id, after_s, event.why)]

    def _on_drain(self, replica: _Replica, event: Drain) -> list[Decision]:
        if replica.state is State.RESTARTING:
            replica.state, replica.why = State.STOPPED, "drained while down"
            return [Stop(replica.replica_id, 0.0, replica.why)]
        end_ns = self._clock.now_ns() + int(event.timeout_s * NS_PER_S)
        if replica.state is State.DRAINING:
            replica.t_drain_end_ns = min(replica.t_drain_end_ns, end_ns)  # a second order can only hurry
            return []
        was_ready = replica.state is State.READY
        replica.state, replica.why, replica.t_drain_end_ns = State.DRAINING, "draining", end_ns
        return [SetReady(replica.replica_id, False, "draining")] if was_ready else []

    def _enter(self, replica: _Replica, state: State, why: str) -> list[Decision]:
        replica.state, replica.why = state, why
        return [SetReady(replica.replica_id, state is State.READY, why)]

    def _shoot(self, replica: _Replica, why: str) -> list[Decision]:
        num_wanted = sum(r.wanted for r in self._replicas.values())
        num_down = sum(r.down for r in self._replicas.values() if r.wanted)
        if replica.stopping or num_down >= max(1, int(self._policy.max_restarting_fraction * num_wanted)):
            return []
        replica.stopping, replica.why = True, why
        return [Stop(replica.replica_id, self._policy.kill_grace_s, why)]

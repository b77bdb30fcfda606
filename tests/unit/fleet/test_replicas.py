from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.core.clock import VirtualClock
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.fleet.decide.life import (
    KINDS,
    TRANSITIONS,
    Decision,
    Drain,
    Event,
    EventKind,
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
from inferloop.fleet.decide.replicas import IllegalMoveError, ReplicaPolicy, ReplicaTable

POLICY = ReplicaPolicy(
    unready_failures=3,
    unready_after_s=3,
    hang_window_s=20,
    progress_window_s=10,
    max_restarting_fraction=0.5,
    backoff_base_s=1,
    backoff_cap_s=8,
    stable_after_s=30,
    kill_grace_s=2,
)
SAMPLES: dict[EventKind, Event] = {
    EventKind.STARTED: Started(1),
    EventKind.READY: Ready(),
    EventKind.NOT_READY: NotReady("draining"),
    EventKind.PROBE_FAILED: ProbeFailed("timeout"),
    EventKind.EXITED: Exited("code 1"),
    EventKind.PROGRESS: Progress(1, 0),
    EventKind.DRAIN: Drain(5),
}


class World:
    """A table, its clock, and the replicas named r0, r1, ..."""

    def __init__(self, num_replicas: int = 1, *, ready: bool = True) -> None:
        self.clock = VirtualClock()
        self.table = ReplicaTable(POLICY, self.clock)
        for i in range(num_replicas):
            self.table.add(f"r{i}")
            if ready:
                self.handle(f"r{i}", Started(100 + i))
                self.handle(f"r{i}", Ready())

    def handle(self, replica_id: str, event: Event) -> list[Decision]:
        return self.table.handle(replica_id, event)

    def pass_s(self, seconds: float) -> None:
        self.clock.advance(int(seconds * NS_PER_S))

    def in_state(self, state: State) -> None:
        """Bring r0 (of a world with ready=False) into a state by legal events."""
        to_ready: list[Event] = [Started(1), Ready()]
        unready: list[Event] = [*to_ready, ProbeFailed("x"), ProbeFailed("x"), ProbeFailed("x")]
        paths: dict[State, list[Event]] = {
            State.STARTING: [],
            State.READY: to_ready,
            State.UNREADY: unready,
            State.DRAINING: [*to_ready, Drain(5)],
            State.RESTARTING: [*to_ready, Exited("x")],
            State.STOPPED: [*to_ready, Drain(5), Exited("x")],
        }
        for event in paths[state]:
            if isinstance(event, ProbeFailed):
                self.pass_s(2)
            self.handle("r0", event)
        assert self.table.state("r0") is state


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", EventKind)
def test_every_pair_of_state_and_event_is_legal_or_refused(state: State, kind: EventKind) -> None:
    world = World(ready=False)
    world.in_state(state)
    before = world.table.view()
    allowed = TRANSITIONS.get((state, kind))
    if allowed is None:
        with pytest.raises(IllegalMoveError, match=f"{kind.value} while {state.value}"):
            world.handle("r0", SAMPLES[kind])
        assert world.table.view() == before, "a refused event changes nothing"
    else:
        world.handle("r0", SAMPLES[kind])
        assert world.table.state("r0") in allowed


def test_stopped_is_final_and_every_event_has_a_kind() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] is State.STOPPED]
    assert set(KINDS.values()) == set(EventKind)


def test_a_life_without_trouble() -> None:
    world = World(ready=False)
    with pytest.raises(IllegalMoveError, match="exists already"):
        world.table.add("r0")
    assert world.table.add("r9") == [Start("r9")]
    assert world.handle("r0", Started(7)) == []
    assert world.handle("r0", Ready()) == [SetReady("r0", True, "ready")]
    assert world.handle("r0", Ready()) == []
    assert world.handle("r0", Drain(5)) == [SetReady("r0", False, "draining")]
    assert world.table.tick({"r0": 1}) == []
    assert world.table.tick({"r0": 0}) == [Stop("r0", 30.0, "drained")]
    assert world.table.tick({"r0": 0}) == [], "asked once"
    assert world.handle("r0", Exited("code 0")) == []
    world.table.remove("r0")
    assert [v.replica_id for v in world.table.view()] == ["r9"]


def test_a_drain_that_runs_out_of_time_stops_with_work_in_flight() -> None:
    world = World()
    world.handle("r0", Drain(5))
    world.pass_s(4.9)
    assert world.table.tick({"r0": 2}) == []
    assert world.handle("r0", Drain(60)) == [], "a second order cannot prolong"
    world.pass_s(0.2)
    assert world.table.tick({"r0": 2}) == [Stop("r0", 2, "out of time with 2 in flight")]


def test_a_dead_replica_comes_back_with_doubling_backoff_that_a_stable_time_resets() -> None:
    world = World()
    waits = []
    for _ in range(6):
        decisions = world.handle("r0", Exited("signal 9"))
        restart = decisions[-1]
        assert isinstance(restart, Restart)
        waits.append(restart.after_s)
        world.handle("r0", Started(1))
        world.handle("r0", Ready())
    assert waits == [1, 2, 4, 8, 8, 8]
    world.pass_s(POLICY.stable_after_s)
    assert world.handle("r0", Exited("signal 9")) == [
        SetReady("r0", False, "signal 9"),
        Restart("r0", 1, "signal 9"),
    ]
    assert world.table.view()[0].num_restarts == 6


def test_failing_to_start_backs_off_too() -> None:
    world = World(ready=False)
    assert world.handle("r0", Exited("no model")) == [Restart("r0", 1, "no model")]
    world.handle("r0", Started())
    assert world.handle("r0", Exited("no model")) == [Restart("r0", 2, "no model")]


def test_failed_probes_make_unready_only_when_repeated_and_lasting_and_an_answer_heals() -> None:
    world = World()
    assert [world.handle("r0", ProbeFailed("late")) for _ in range(5)] == [[]] * 5, "all within an instant"
    world.pass_s(3)
    assert world.handle("r0", ProbeFailed("late")) == [SetReady("r0", False, "6 probes failed: late")]
    assert world.handle("r0", Ready()) == [SetReady("r0", True, "answers again")]


def test_busy_is_not_dead_tokens_outrank_late_probes() -> None:
    world = World(4)
    decisions: list[Decision] = []
    for _ in range(120):  # two minutes in which every probe is late and tokens keep coming
        world.pass_s(1)
        for name in ("r0", "r1", "r2", "r3"):
            decisions += world.handle(name, Progress(relayed=True))
            decisions += world.handle(name, ProbeFailed("no answer within 15 s"))
    assert decisions == []


def test_silence_beyond_the_hang_window_is_shot() -> None:
    world = World()
    stops: list[Decision] = []
    for _ in range(25):
        world.pass_s(1)
        stops += [d for d in world.handle("r0", ProbeFailed("timeout")) if isinstance(d, Stop)]
    assert stops == [Stop("r0", 2, "no sign of life for 20 s: timeout")]
    assert isinstance(world.handle("r0", Exited("signal 9"))[-1], Restart)


def test_a_frozen_step_counter_in_front_of_a_queue_is_unready_and_restarted_once() -> None:
    world = World()
    world.handle("r0", Progress(step_counter=41, num_pending=3))
    world.pass_s(9)
    assert world.handle("r0", Ready()) == [], "healthy endpoint"
    assert world.handle("r0", Progress(step_counter=41, num_pending=4)) == []
    world.pass_s(1)
    why = "no step for 10 s with 4 requests pending"
    assert world.handle("r0", Progress(step_counter=41, num_pending=4)) == [
        SetReady("r0", False, why),
        Stop("r0", 2, why),
    ]
    assert world.handle("r0", Progress(step_counter=41, num_pending=4)) == []
    assert world.handle("r0", Ready()) == [], "its healthy endpoint does not bring it back"
    assert world.handle("r0", Exited("signal 9")) == [Restart("r0", 1, "signal 9")]
    world.handle("r0", Started(2))
    assert world.handle("r0", Ready()) == [SetReady("r0", True, "ready")]


def test_an_idle_replica_with_a_still_counter_is_fine_and_the_window_starts_with_the_work() -> None:
    world = World()
    for _ in range(100):
        world.pass_s(1)
        assert world.handle("r0", Progress(step_counter=5, num_pending=0)) == []
    world.pass_s(9)
    assert world.handle("r0", Progress(step_counter=5, num_pending=1)) == []
    assert world.handle("r0", Progress(step_counter=6, num_pending=1)) == []
    world.pass_s(9)
    assert world.handle("r0", Progress(step_counter=6, num_pending=1)) == []


def test_when_all_freeze_at_once_only_a_fraction_is_shot() -> None:
    world = World(4)
    for i in range(4):
        world.handle(f"r{i}", Progress(1, 1))
    world.pass_s(10)
    stops = [d for i in range(4) for d in world.handle(f"r{i}", Progress(1, 1)) if isinstance(d, Stop)]
    assert [d.replica_id for d in stops] == ["r0", "r1"]
    world.handle("r0", Exited("shot"))
    world.handle("r0", Started())
    assert world.handle("r2", Progress(1, 1)) == [], "r0 is not back yet"
    world.handle("r0", Ready())
    assert [type(d) for d in world.handle("r2", Progress(1, 1))] == [Stop]


def test_progress_saves_a_frozen_replica_that_was_not_shot_yet() -> None:
    world = World(1)
    world.table.add("r1")  # starting for the first time is not "down"
    world.handle("r0", Progress(1, 1))
    world.handle("r1", Started())
    world.handle("r1", Exited("x"))
    world.pass_s(10)
    assert world.handle("r0", Progress(1, 1)) == [SetReady("r0", False, "no step for 10 s with 1 requests pending")]
    assert world.handle("r0", Progress(2, 1)) == [SetReady("r0", True, "makes progress again")]


def test_a_replica_that_says_it_is_not_ready_gets_no_work_and_is_not_shot() -> None:
    world = World()
    assert world.handle("r0", NotReady("warming up")) == [SetReady("r0", False, "warming up")]
    for _ in range(100):
        world.pass_s(1)
        assert world.handle("r0", NotReady("warming up")) + world.handle("r0", Progress(1, 0)) == []
    assert world.handle("r0", Progress(2, 0)) == [], "steps alone do not make it ready"
    assert world.handle("r0", Ready()) == [SetReady("r0", True, "answers again")]


def test_a_process_that_answers_for_a_dead_engine_is_replaced_at_once() -> None:
    world = World()
    why = "its engine has stopped"
    assert world.handle("r0", Progress(9, 0, alive=False)) == [SetReady("r0", False, why), Stop("r0", 2, why)]


def test_draining_while_down_stops_the_restart() -> None:
    world = World()
    world.handle("r0", Exited("x"))
    assert world.handle("r0", Drain(5)) == [Stop("r0", 0, "drained while down")]
    assert world.table.state("r0") is State.STOPPED


EVENTS: st.SearchStrategy[Any] = st.one_of(
    st.just(Started(1)),
    st.just(Ready()),
    st.just(ProbeFailed("x")),
    st.just(Exited("x")),
    st.just(NotReady("x")),
    st.builds(Progress, st.integers(0, 3) | st.none(), st.integers(0, 2), st.booleans(), st.booleans()),
    st.builds(Drain, st.floats(0, 10)),
)


@given(st.lists(st.tuples(st.integers(0, 3), EVENTS, st.integers(0, 15_000)), max_size=120))
def test_decisions_agree_with_states_over_any_history(history: list[tuple[int, Event, int]]) -> None:
    world = World(4, ready=False)
    ready: dict[str, bool] = {}
    shot: set[str] = set()
    for i, event, advance_ms in history:
        world.clock.advance(advance_ms * NS_PER_MS)
        name = f"r{i}"
        before = world.table.state(name)
        try:
            decisions = world.handle(name, event)
        except IllegalMoveError:
            assert world.table.state(name) is before
            continue
        if isinstance(event, Exited):
            shot.discard(name)
            restarts = [d for d in decisions if isinstance(d, Restart)]
            assert len(restarts) == (before is not State.DRAINING)
            assert all(1 <= d.after_s <= 8 for d in restarts)
        if isinstance(event, Drain):
            shot.discard(name)
        decisions += world.table.tick({})
        for decision in decisions:
            if isinstance(decision, SetReady):
                assert ready.get(decision.replica_id, False) is not decision.ready, "told only when it changes"
                ready[decision.replica_id] = decision.ready
            if isinstance(decision, Stop) and world.table.state(decision.replica_id) is State.UNREADY:
                assert decision.replica_id not in shot, "shot once per life"
                shot.add(decision.replica_id)
        num_wanted = sum(v.state not in (State.DRAINING, State.STOPPED) for v in world.table.view())
        assert len(shot) <= 2 if num_wanted == 4 else True
        for view in world.table.view():
            assert ready.get(view.replica_id, False) is (view.state is State.READY)

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from inferloop.fleet.decide.router import Choice, Lease, ReplicaLoad, Router, choose

LOADS = st.lists(
    st.builds(ReplicaLoad, st.uuids().map(str), st.integers(0, 50), st.booleans()),
    max_size=8,
    unique_by=lambda r: r.replica_id,
)


@given(LOADS, st.integers(0, 2**32), st.integers(1, 60) | st.none(), st.data())
def test_the_choice_is_least_loaded_among_eligible(
    loads: list[ReplicaLoad], seed: int, bound: int | None, data: st.DataObject
) -> None:
    exclude = data.draw(st.sets(st.sampled_from([r.replica_id for r in loads]))) if loads else set()
    choice = choose(loads, random.Random(seed), exclude=exclude, max_in_flight=bound)
    eligible = {r.replica_id: r.in_flight for r in loads if r.ready and r.replica_id not in exclude}
    if choice.replica_id is None:
        if choice.refusal == "no_replica_ready":
            assert not eligible
        else:
            assert bound is not None and eligible and min(eligible.values()) >= bound
    else:
        assert choice.refusal is None
        assert eligible[choice.replica_id] == min(eligible.values())
        assert bound is None or eligible[choice.replica_id] < bound


def test_a_dead_replica_with_nothing_in_flight_does_not_win() -> None:
    loads = [ReplicaLoad("dead", 0, False), ReplicaLoad("a", 5, True), ReplicaLoad("b", 4, True)]
    assert choose(loads, random.Random(0)).replica_id == "b"


def test_ties_are_shared_and_reproducible() -> None:
    loads = [ReplicaLoad(name, 0, True) for name in "abcd"]
    picks = [choose(loads, rng).replica_id for rng in [random.Random(7)] for _ in range(4000)]
    assert all(850 < count < 1150 for count in Counter(picks).values())
    again = [choose(loads, rng).replica_id for rng in [random.Random(7)] for _ in range(4000)]
    assert picks == again


@given(st.lists(st.tuples(st.sampled_from(["admit", "release", "release_twice", "down", "up"]), st.integers(0, 99))))
def test_in_flight_equals_ground_truth_whatever_happens(steps: list[tuple[str, int]]) -> None:
    router = Router(seed=1, max_in_flight=5)
    for name in "abc":
        router.set_ready(name, True)
    held: list[Lease] = []
    for action, n in steps:
        if action == "admit":
            lease = router.admit()
            if isinstance(lease, Lease):
                held.append(lease)
        elif action in ("release", "release_twice") and held:
            lease = held.pop(n % len(held))
            lease.release()
            if action == "release_twice":
                lease.release()
        elif action in ("down", "up"):
            router.set_ready("abc"[n % 3], action == "up")
        truth = Counter(lease.replica_id for lease in held)
        assert {name: router.in_flight(name) for name in "abc"} == {name: truth[name] for name in "abc"}
        assert router.num_in_flight == len(held)
    for lease in held:
        with lease:
            pass
    assert router.num_in_flight == 0


def test_64_at_once_over_4_are_spread_evenly() -> None:
    router = Router(seed=3)
    for name in "abcd":
        router.set_ready(name, True)
    leases = [router.admit() for _ in range(64)]
    assert {r.replica_id: r.in_flight for r in router.snapshot()} == dict.fromkeys("abcd", 16)
    assert all(isinstance(lease, Lease) for lease in leases)


def test_a_forgotten_replica_takes_nothing_and_its_leases_still_come_back() -> None:
    router = Router()
    router.set_ready("a", True)
    lease = router.admit()
    assert isinstance(lease, Lease)
    router.forget("a")
    refused = router.admit()
    assert isinstance(refused, Choice) and refused.refusal == "no_replica_ready"
    assert router.num_in_flight == 1
    lease.release()
    assert router.num_in_flight == 0
    assert router.snapshot() == (), "a replica that is gone must not haunt the metrics"

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.core.units import GIB
from inferloop.fleet.decide.fit import MachineCapacity, ReplicaNeeds, fit


def test_what_fits_is_started_without_remarks() -> None:
    decision = fit(2, ReplicaNeeds(4 * GIB, 2), MachineCapacity(16 * GIB, 8))
    assert (decision.start, decision.missing, decision.reasons, decision.fits) == (2, 0, (), True)


def test_memory_bounds_and_says_so() -> None:
    decision = fit(5, ReplicaNeeds(4 * GIB, 1), MachineCapacity(10 * GIB, 64))
    assert (decision.start, decision.missing) == (2, 3)
    assert decision.reasons == ("memory: 5 x 4.0 GiB needed, 10.0 GiB available, room for 2",)


def test_cores_bound_but_the_first_replica_runs_anyway() -> None:
    decision = fit(3, ReplicaNeeds(GIB, 4), MachineCapacity(64 * GIB, 2))
    assert (decision.start, decision.missing) == (1, 2)
    assert decision.reasons == ("cores: 3 x 4 threads needed, 2 cores, room for 0",)
    alone = fit(1, ReplicaNeeds(GIB, 4), MachineCapacity(64 * GIB, 2))
    assert (alone.start, alone.missing) == (1, 0) and alone.reasons, "the shortage is said even when it starts"


def test_nothing_is_started_where_not_even_one_fits() -> None:
    assert fit(1, ReplicaNeeds(2 * GIB, 1), MachineCapacity(GIB, 2)).start == 0


@pytest.mark.parametrize("needs", [ReplicaNeeds(0, 1), ReplicaNeeds(1, 0), ReplicaNeeds(-1, 1)])
def test_senseless_needs_are_refused(needs: ReplicaNeeds) -> None:
    with pytest.raises(ValueError, match="positive"):
        fit(1, needs, MachineCapacity(GIB, 1))


@given(st.integers(0, 50), st.integers(1, 100), st.integers(1, 16), st.integers(0, 1000), st.integers(1, 64))
def test_never_more_than_needed_nor_than_memory_holds(
    needed: int, mem: int, threads: int, total: int, cores: int
) -> None:
    decision = fit(needed, ReplicaNeeds(mem, threads), MachineCapacity(total, cores))
    assert decision.start + decision.missing == needed
    assert decision.start * mem <= total
    assert decision.start <= 1 or decision.start * threads <= cores
    assert decision.missing == 0 or decision.reasons

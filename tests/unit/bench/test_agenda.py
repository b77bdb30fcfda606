"""What is due when: instants of their own, chains, sessions; on virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.bench.agenda import Agenda, Due, in_chains, turns_of
from inferloop.bench.plan import share_out, steps_of
from inferloop.core.errors import UsageError
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.units import NS_PER_MS, NS_PER_S

OWN = (Segment(1, 10),)


def request(index: int, at_s: float, after: int | None = None, session: int | None = None) -> TimedRequest:
    return TimedRequest(index, at_s, OWN, 5, "default", after, session)


def play(plan: Sequence[TimedRequest], service_ns: int, **how: int) -> list[tuple[Due, int]]:
    """What is sent when by a perfect client of a server that answers after `service_ns`; every answer is a success."""
    agenda, now, sent = Agenda(steps_of(plan), **how), 0, []
    running: list[tuple[int, int]] = []
    while True:
        for due in agenda.due(now, len(running)):
            sent.append((due, now))
            running.append((now + service_ns, due.position))
        wakes = [t for t in (agenda.next_wake_ns, min(running)[0] if running else None) if t is not None]
        if not wakes:
            assert agenda.finished
            return sent
        now = max(now, min(wakes))
        for end in sorted(r for r in running if r[0] <= now):
            running.remove(end)
            agenda.ended(end[1], end[0], failed=False)


def test_open_arrivals_are_due_at_their_instants_in_any_order_of_the_plan() -> None:
    plan = [request(0, 0.3), request(1, 0.1), request(2, 0.2)]
    assert play(plan, NS_PER_S) == [(Due(i, t), t) for i, t in ((1, 10**8), (2, 2 * 10**8), (0, 3 * 10**8))]


def test_a_turn_is_due_after_the_end_of_the_one_before_and_its_lateness_counts_from_there() -> None:
    plan = [request(0, 0.5, None, 7), request(1, 2.0, 0, 7), request(2, 0.0, 1, 7)]
    first, second, third = play(plan, 100 * NS_PER_MS)
    assert first == (Due(0, 5 * 10**8), 5 * 10**8)
    assert second == (Due(1, 2_600_000_000), 2_600_000_000)
    assert third == (Due(2, 2_700_000_000), 2_700_000_000)
    assert turns_of(plan) == {0: (0, 3), 1: (1, 3), 2: (2, 3)}


def test_closed_loops_know_no_lateness() -> None:
    plan = in_chains([request(i, 9.0) for i in range(6)], 2)
    sent = play(plan, 100 * NS_PER_MS)
    assert [(due.position, t // NS_PER_MS) for due, t in sent] == [
        (0, 0),
        (1, 0),
        (2, 100),
        (3, 100),
        (4, 200),
        (5, 200),
    ]
    assert all(due.t_intended_ns is None for due, _ in sent)


def test_a_thinking_user_waits_before_the_next() -> None:
    plan = [request(0, 0.0), request(1, 0.05, 0), request(2, 0.05, 1)]
    assert [t // NS_PER_MS for _, t in play(plan, 10 * NS_PER_MS)] == [0, 60, 120]


def test_a_failed_turn_drops_the_rest_of_its_session_and_of_no_other() -> None:
    plan = [
        request(0, 0.0, None, 1),
        request(1, 1.0, 0, 1),
        request(2, 1.0, 1, 1),
        request(3, 1.0, 0),
        request(4, 0.0, 3),
        request(5, 1.0, 0, 2),
    ]
    agenda = Agenda(steps_of(plan))
    assert agenda.due(0) == [Due(0, 0)]
    assert agenda.num_left == 5
    agenda.ended(0, 10, failed=True)
    assert (agenda.num_dropped_turns, agenda.num_left) == (2, 3)
    assert agenda.due(NS_PER_S + 10) == [Due(3, None), Due(5, NS_PER_S + 10)]
    agenda.ended(3, 2 * NS_PER_S, failed=True)
    assert agenda.due(2 * NS_PER_S) == [Due(4, None)]
    assert agenda.finished and agenda.num_left == 0


def test_turns_after_one_that_was_forgone_are_forgone_too() -> None:
    plan = [request(0, 0.1, None, 1), request(1, 1.0, 0, 1), request(2, 0.9), request(3, 2.0)]
    agenda = Agenda(steps_of(plan), max_catch_up_ns=250 * NS_PER_MS)
    assert agenda.due(NS_PER_S) == [Due(2, 900 * NS_PER_MS)]
    assert (agenda.num_forgone, agenda.num_left) == (2, 1)
    assert (agenda.stalls[0].late_ns, agenda.stalls[0].num_forgone) == (900 * NS_PER_MS, 1)


def test_a_closed_loop_is_never_forgone() -> None:
    agenda = Agenda(steps_of(in_chains([request(i, 0.0) for i in range(4)], 2)), max_catch_up_ns=1)
    assert [due.position for due in agenda.due(NS_PER_S)] == [0, 1]
    assert agenda.num_forgone == 0


def test_a_burst_is_sent_however_late_the_window_begins() -> None:
    agenda = Agenda(steps_of([request(i, 0.0) for i in range(3)]), max_catch_up_ns=1)
    assert agenda.due(NS_PER_S) == [Due(i, 0) for i in range(3)]
    assert (agenda.num_forgone, agenda.finished) == (0, True)


def test_a_late_wake_releases_all_kinds_in_the_order_in_which_they_fell_due() -> None:
    plan = [request(0, 0.004), request(1, 0.0), request(2, 0.002), request(3, 0.003), request(4, 0.0, 3)]
    agenda = Agenda(steps_of(plan))
    ms = NS_PER_MS
    assert agenda.due(7 * ms) == [Due(1, 0), Due(2, 2 * ms), Due(3, None), Due(0, 4 * ms)]
    agenda.ended(3, 9 * ms, failed=False)
    assert agenda.due(20 * ms) == [Due(4, None)]


def test_a_cap_holds_for_all_kinds_together() -> None:
    """10 per second, 200 ms each, one at a time: the backlog is seen in the lateness; no instant moves."""
    sent = play([request(i, i / 10) for i in range(50)], 200 * NS_PER_MS, max_in_flight=1)
    assert [t // NS_PER_MS for _, t in sent] == [200 * i for i in range(50)]
    assert [(due.t_intended_ns or 0) // NS_PER_MS for due, _ in sent] == [100 * i for i in range(50)]
    mixed = [*in_chains([request(i, 0.0) for i in range(4)], 2), request(4, 0.0)]
    assert len(play(mixed, NS_PER_MS, max_in_flight=1)) == 5


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ([request(0, 0.0, 9)], "follows 9"),
        ([request(0, 0.0, 1), request(1, 0.0)], "follows 1"),
        ([request(0, 0.0, 0)], "follows 0"),
        ([request(3, 0.0), request(3, 1.0)], "are number 3"),
        ([request(0, 0.0), request(0, 1.0)], "are number 0"),
        ([request(0, 0.0), request(1, 0.0, -1)], "follows -1"),
        ([request(0, 0.0), request(1, 0.0, -2)], "follows -2"),
        ([request(5, 0.0), request(4, 0.0, 3), request(3, 0.0)], "follows 3"),
    ],
)
def test_plans_that_cannot_be_followed_are_refused(plan: list[TimedRequest], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        steps_of(plan)


@given(st.lists(st.integers(-3, 60), max_size=60), st.integers(1, 5))
def test_shares_hold_everything_once_and_chains_whole(after: list[int], num_shares: int) -> None:
    plan = [request(i, 0.0, a if 0 <= a < i else None, session=i % 4 if a < -1 else None) for i, a in enumerate(after)]
    shares = [list(share) for share in share_out(steps_of(plan), num_shares)]
    assert sorted(i for share in shares for i in share) == list(range(len(plan)))
    where = {i: number for number, share in enumerate(shares) for i in share}
    for i, r in enumerate(plan):
        assert r.after is None or where[r.after] == where[i]
        assert r.session is None or where[i] == next(where[j] for j in where if plan[j].session == r.session)
    assert [share == sorted(share) for share in shares] == [True] * num_shares


def test_open_arrivals_are_dealt_in_turn() -> None:
    shares = share_out(steps_of([request(i, i / 10) for i in range(7)]), 3)
    assert [list(share) for share in shares] == [[0, 3, 6], [1, 4], [2, 5]]

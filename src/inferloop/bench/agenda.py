"""What is due: requests at instants of their own, and requests that follow the end of another. Decides only.

All instants are nanoseconds after the start of the window. A request that follows none is due at its instant, by the
rules of `Pacer`; one that follows another is due a while after that one ended. In a session a failed turn ends the
conversation. Closed loops, chains without a session, know no lateness: a user who waits sends when the answer is there.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from inferloop.bench.pace import Pacer, Stall
from inferloop.bench.plan import NONE, Planned, Steps
from inferloop.core.request import TimedRequest


class Due(NamedTuple):
    """`position` in the plan. `t_intended_ns` is None where lateness has no meaning."""

    position: int
    t_intended_ns: int | None


class Agenda:
    """Plays the plan of one window, or of a sender's share of it.

    `max_in_flight`: what is due waits for a free slot, its instant stays.
    """

    def __init__(self, plan: Steps, *, max_catch_up_ns: int = 250_000_000, max_in_flight: int | None = None) -> None:
        self._max_in_flight = max_in_flight
        self._at_ns, self._session = plan.at_ns, plan.session
        self._first, self._next = _followers(plan)
        opened, closed, at_start = array("i"), [], []
        for i, (after, at_ns, session) in enumerate(zip(plan.after, plan.at_ns, plan.session, strict=True)):
            if after != NONE:
                continue
            if session == NONE and self._first[i] != NONE:
                closed.append(i)
            elif not at_ns:  # what is due as the window begins is no backlog, however late a busy machine begins it
                at_start.append(i)
            else:
                opened.append(i)
        at = plan.at_ns
        if any(at[a] > at[b] for a, b in itertools.pairwise(opened)):
            opened = array("i", sorted(opened, key=at.__getitem__))
        self._open = opened
        deadlines = array("q", map(at.__getitem__, opened))
        self._pacer = Pacer(deadlines, start_ns=0, max_catch_up_ns=max_catch_up_ns, max_in_flight=max_in_flight)
        self._later: list[tuple[int, Due]] = [(at[i], Due(i, None)) for i in closed]
        self._later += [(0, Due(i, 0)) for i in at_start]
        heapq.heapify(self._later)
        self._ready: deque[tuple[int, Due]] = deque()
        self._num_capped = 0
        self.num_dropped_turns = self.num_forgone = 0
        self.num_left = len(plan)
        """Requests that may yet be sent, those that follow others included."""

    @property
    def next_wake_ns(self) -> int | None:
        """When something falls due next, as far as is known now."""
        wake = self._pacer.next_wake_ns
        if self._later and (wake is None or self._later[0][0] < wake):
            return self._later[0][0]
        return wake

    @property
    def finished(self) -> bool:
        """Nothing is left to send but what follows requests in flight."""
        return not (self._ready or self._later) and self._pacer.finished

    @property
    def stalls(self) -> tuple[Stall, ...]:
        return tuple(self._pacer.stalls)

    @property
    def num_capped(self) -> int:
        return self._pacer.num_capped + self._num_capped

    def due(self, now_ns: int, num_in_flight: int = 0) -> list[Due]:
        """What is to be sent now, in the order in which it fell due."""
        num_before = self._pacer.num_forgone
        opened = [Due(self._open[i], self._pacer.deadline(i)) for i in self._pacer.due(now_ns, num_in_flight)]
        for i in self._pacer.forgone[num_before:]:
            num = 1 + self._num_after(self._open[i])
            self.num_forgone += num
            self.num_left -= num
        while self._later and self._later[0][0] <= now_ns:
            self._ready.append(heapq.heappop(self._later))
        room = len(self._ready)
        if self._max_in_flight is not None:
            room = min(room, max(0, self._max_in_flight - num_in_flight - len(opened)))
            self._num_capped += room < len(self._ready)
        others = [self._ready.popleft() for _ in range(room)]
        self.num_left -= len(opened) + len(others)
        if not opened:
            return [due for _, due in others]
        return [due for _, due in sorted([*others, *((due.t_intended_ns or 0, due) for due in opened)], key=_instant)]

    def ended(self, position: int, t_end_ns: int, *, failed: bool) -> bool:
        """A request that was sent has ended: what follows it falls due after its gap, or never. Returns whether there
        may be something new to do."""
        follower = self._first[position]
        if follower == NONE:
            return self._max_in_flight is not None
        session = self._session[position]
        while follower != NONE:
            gap_ns, own = self._at_ns[follower], self._session[follower]
            if failed and own != NONE and own == session:
                num = 1 + self._num_after(follower)
                self.num_dropped_turns += num
                self.num_left -= num
            else:
                due_ns = t_end_ns + gap_ns
                due = Due(follower, None if own == NONE else due_ns)
                if gap_ns:
                    heapq.heappush(self._later, (due_ns, due))
                else:
                    self._ready.append((due_ns, due))
            follower = self._next[follower]
        return True

    def _num_after(self, position: int) -> int:
        num, stack = 0, [position]
        while stack:
            found = list(self._after(stack.pop()))
            num += len(found)
            stack += found
        return num

    def _after(self, position: int) -> Iterator[int]:
        follower = self._first[position]
        while follower != NONE:
            yield follower
            follower = self._next[follower]


def _followers(plan: Steps) -> tuple[array[int], array[int]]:
    """(the first request that follows the one at a place, the next one that follows the same), or NONE."""
    first, after_it = array("i", [NONE]) * len(plan), array("i", [NONE]) * len(plan)
    for place in range(len(plan) - 1, -1, -1):
        before = plan.after[place]
        if before != NONE:
            after_it[place] = first[before]
            first[before] = place
    return first, after_it


def turns_of(plan: Sequence[Planned]) -> dict[int, tuple[int, int]]:
    """(turn from 0, planned turns) for each position that belongs to a session."""
    members: dict[int, list[int]] = {}
    for position, request in enumerate(plan):
        if request.session is not None:
            members.setdefault(request.session, []).append(position)
    return {position: (turn, len(found)) for found in members.values() for turn, position in enumerate(found)}


def in_chains(plan: Sequence[TimedRequest], num_chains: int) -> list[TimedRequest]:
    """The same requests as a closed loop of `num_chains` users who never pause, each with every `num_chains`-th."""
    return [
        replace(r, at_s=0.0, after=plan[i - num_chains].index if i >= num_chains else None, session=None)
        for i, r in enumerate(plan)
    ]


def _instant(entry: tuple[int, Due]) -> int:
    return entry[0]

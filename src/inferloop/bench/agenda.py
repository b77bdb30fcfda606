"""What is due: requests at instants of their own, and requests that follow the end of another. Decides only.

All instants are nanoseconds after the start of the window. A request that follows none is due at its instant, by the
rules of `Pacer`; one that follows another is due a while after that one ended. In a session a failed turn ends the
conversation. Closed loops, chains without a session, know no lateness: a user who waits sends when the answer is there.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from inferloop.bench.pace import Pacer, Stall
from inferloop.core.errors import UsageError
from inferloop.core.request import TimedRequest
from inferloop.core.units import NS_PER_S


class Planned(Protocol):
    """What is asked of a request here; see core.request.TimedRequest."""

    @property
    def index(self) -> int: ...
    @property
    def at_s(self) -> float: ...
    @property
    def after(self) -> int | None: ...
    @property
    def session(self) -> int | None: ...


class Due(NamedTuple):
    """`position` in the plan. `t_intended_ns` is None where lateness has no meaning."""

    position: int
    t_intended_ns: int | None


class Agenda:
    """Owns the plan of one window, or of a sender's share of it. Raises UsageError for a plan that cannot be followed.

    `max_in_flight`: what is due waits for a free slot, its instant stays.
    """

    def __init__(
        self, plan: Sequence[Planned], *, max_catch_up_ns: int = 250_000_000, max_in_flight: int | None = None
    ) -> None:
        self._plan, self._max_in_flight = plan, max_in_flight
        self._followers = followers(plan)
        heads = [i for i, request in enumerate(plan) if request.after is None]
        closed = [i for i in heads if plan[i].session is None and i in self._followers]
        chained = set(closed)
        # What is due as the window begins is no backlog, however late a busy machine begins it.
        at_start = [i for i in heads if i not in chained and not _ns(plan[i].at_s)]
        self._open = sorted(set(heads).difference(closed, at_start), key=lambda i: (plan[i].at_s, i))
        self._pacer = Pacer(
            [_ns(plan[i].at_s) for i in self._open],
            start_ns=0,
            max_catch_up_ns=max_catch_up_ns,
            max_in_flight=max_in_flight,
        )
        self._later: list[tuple[int, Due]] = [(_ns(plan[i].at_s), Due(i, None)) for i in closed]
        self._later += [(0, Due(i, 0)) for i in at_start]
        heapq.heapify(self._later)
        self._ready: deque[tuple[int, Due]] = deque()
        self._num_capped = 0
        self.num_dropped_turns = 0

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
    def num_forgone(self) -> int:
        return sum(1 + self._num_after(self._open[i]) for i in self._pacer.forgone)

    @property
    def stalls(self) -> tuple[Stall, ...]:
        return tuple(self._pacer.stalls)

    @property
    def num_capped(self) -> int:
        return self._pacer.num_capped + self._num_capped

    def due(self, now_ns: int, num_in_flight: int = 0) -> list[Due]:
        """What is to be sent now, in the order in which it fell due."""
        opened = [Due(self._open[i], self._pacer.deadline(i)) for i in self._pacer.due(now_ns, num_in_flight)]
        while self._later and self._later[0][0] <= now_ns:
            self._ready.append(heapq.heappop(self._later))
        room = len(self._ready)
        if self._max_in_flight is not None:
            room = min(room, max(0, self._max_in_flight - num_in_flight - len(opened)))
            self._num_capped += room < len(self._ready)
        others = [self._ready.popleft() for _ in range(room)]
        if not opened:
            return [due for _, due in others]
        return [due for _, due in sorted([*others, *((due.t_intended_ns or 0, due) for due in opened)], key=_instant)]

    def ended(self, position: int, t_end_ns: int, *, failed: bool) -> bool:
        """A request that was sent has ended: what follows it falls due after its gap, or never. Returns whether there
        may be something new to do."""
        found = self._followers.get(position)
        if found is None:
            return self._max_in_flight is not None
        for follower in found:
            request = self._plan[follower]
            if failed and request.session is not None and request.session == self._plan[position].session:
                self.num_dropped_turns += 1 + self._num_after(follower)
                continue
            gap_ns = _ns(request.at_s) if request.at_s else 0
            due_ns = t_end_ns + gap_ns
            due = Due(follower, None if request.session is None else due_ns)
            if gap_ns:
                heapq.heappush(self._later, (due_ns, due))
            else:
                self._ready.append((due_ns, due))
        return True

    def _num_after(self, position: int) -> int:
        num, stack = 0, [position]
        while stack:
            found = self._followers.get(stack.pop(), ())
            num += len(found)
            stack += found
        return num


def followers(plan: Sequence[Planned]) -> dict[int, list[int]]:
    """Positions of the requests that follow the one at a position. Raises UsageError for one that follows no earlier
    request of the plan."""
    position_of: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    for position, request in enumerate(plan):
        if request.after is not None:
            before = position_of.get(request.after)
            if before is None:
                raise UsageError(f"request {request.index} follows {request.after}, which is not before it in the plan")
            found.setdefault(before, []).append(position)
        if position_of.setdefault(request.index, position) != position:
            raise UsageError(f"two requests of the plan are number {request.index}")
    return found


def share_out(plan: Sequence[Planned], num_shares: int) -> list[list[int]]:
    """Positions for each of `num_shares` senders, in order. Chains stay whole; their heads, and requests that follow
    none, are dealt in turn, so that each sender has its share of every stretch of the window."""
    followers(plan)  # checks the plan
    share_of: dict[int, int] = {}
    session_share: dict[int, int] = {}
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    num_dealt = 0
    for position, request in enumerate(plan):
        share = None if request.after is None else share_of[request.after]
        if share is None and request.session is not None:
            share = session_share.get(request.session)
        if share is None:
            share, num_dealt = num_dealt % num_shares, num_dealt + 1
        if request.session is not None:
            session_share.setdefault(request.session, share)
        share_of[request.index] = share
        shares[share].append(position)
    return shares


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


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)

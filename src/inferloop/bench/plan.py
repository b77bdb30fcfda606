"""A plan in columns, 16 bytes a request where objects take hundreds: what is due when, and after what."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from inferloop.core.errors import UsageError
from inferloop.core.units import NS_PER_S

NONE = -1


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


class Steps:
    """One entry per request, by its place in the plan. `at_ns` is since the start of the window, or since the end of
    the request at the place `after`; NONE: after none, of no session. Sessions are numbered from 0."""

    __slots__ = ("after", "at_ns", "session")

    def __init__(self) -> None:
        self.at_ns, self.after, self.session = array("q"), array("i"), array("i")

    def __len__(self) -> int:
        return len(self.at_ns)


def steps_of(plan: Sequence[Planned]) -> Steps:
    """Raises UsageError for a request that follows no earlier one of the plan, and for two of one number."""
    place_of: dict[int, int] | None = None
    if any(request.index != place for place, request in enumerate(plan)):
        place_of = {}
    sessions: dict[int, int] = {}
    steps = Steps()
    for place, request in enumerate(plan):
        before = NONE
        if request.after is not None:
            if place_of is not None:
                before = place_of.get(request.after, NONE)
            elif 0 <= request.after < place:
                before = request.after
            if before == NONE:
                raise UsageError(f"request {request.index} follows {request.after}, which is not before it in the plan")
        if place_of is not None and place_of.setdefault(request.index, place) != place:
            raise UsageError(f"two requests of the plan are number {request.index}")
        steps.at_ns.append(round(request.at_s * NS_PER_S) if request.at_s else 0)
        steps.after.append(before)
        steps.session.append(NONE if request.session is None else sessions.setdefault(request.session, len(sessions)))
    return steps


def share_out(steps: Steps, num_shares: int) -> list[array[int]]:
    """Places for each of `num_shares` senders, in order. Chains stay whole; their heads, and requests that follow
    none, are dealt in turn, so that each sender has its share of every stretch of the window."""
    share_of = array("i")
    session_share: dict[int, int] = {}
    shares = [array("i") for _ in range(num_shares)]
    num_dealt = 0
    for place, (after, session) in enumerate(zip(steps.after, steps.session, strict=True)):
        share = NONE if after == NONE else share_of[after]
        if share == NONE and session != NONE:
            share = session_share.get(session, NONE)
        if share == NONE:
            share, num_dealt = num_dealt % num_shares, num_dealt + 1
        if session != NONE:
            session_share.setdefault(session, share)
        share_of.append(share)
        shares[share].append(place)
    return shares

"""Queries that follow each other: the turns of a conversation, the calls of a tool loop, the users of a closed loop.

A conversation has `turns`, each turn takes `queries_per_request` calls; between turns a person thinks, between calls a
tool runs. Every call sends all that was said before it, then something new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inferloop.contract.draws import Draws
from inferloop.contract.quantile import QuantileFunction
from inferloop.contract.workload import Distribution, Traffic
from inferloop.core.errors import UsageError
from inferloop.core.request import Segment
from inferloop.core.units import NS_PER_MS

LEAST_OWN = 16
"""Tokens of a later turn that are new at least: what a template puts around a message must fit."""
LEAST_PIECE = 8


@dataclass(slots=True)
class Chain:
    """One conversation: when it begins, and the pause before each later call. `after`: the chain whose end it follows,
    `start_ns` after that; the first call is at `start_ns` of the window otherwise."""

    start_ns: int
    gaps_ns: tuple[int, ...] = ()
    after: int | None = None
    members: list[int] = field(default_factory=list)

    @property
    def num_calls(self) -> int:
        return 1 + len(self.gaps_ns)


class Loop:
    """Draws the pauses of conversations. Each has streams of its own, so a run may be cut anywhere."""

    def __init__(self, traffic: Traffic, *names: str | int) -> None:
        self._turns, self._calls = _function(traffic.turns), _function(traffic.queries_per_request)
        self._think_ms, self._tool_ms = _function(traffic.think_ms), _function(traffic.tool_ms)
        self._names = names
        self.is_single = all(f is None or (f.count(0.0) == f.count(1.0) == 1) for f in (self._turns, self._calls))

    @property
    def mean_calls(self) -> float:
        """Queries of one conversation, in the mean."""
        return _mean_count(self._turns) * _mean_count(self._calls)

    def gaps_ns(self, number: int) -> tuple[int, ...]:
        """The pauses within conversation `number`, one fewer than it has calls."""
        if self.is_single:
            return ()
        draws = Draws(*self._names, "chain", number)
        gaps: list[int] = []
        for turn in range(_count(self._turns, draws)):
            if turn:
                gaps.append(_pause_ns(self._think_ms, draws))
            gaps += [_pause_ns(self._tool_ms, draws) for _ in range(_count(self._calls, draws) - 1)]
        return tuple(gaps)

    def pauses_ns(self, number: int, count: int) -> tuple[int, ...]:
        """Times to think for a conversation whose turns are known, of a trace."""
        draws = Draws(*self._names, "chain", number)
        return tuple(_pause_ns(self._think_ms, draws) for _ in range(count))

    def sizes(self, num_calls: int) -> list[tuple[int, ...]]:
        """Conversations (as their pauses) with this many calls in all; the last is cut."""
        found: list[tuple[int, ...]] = []
        left = num_calls
        while left > 0:
            gaps = self.gaps_ns(len(found))[: left - 1]
            found.append(gaps)
            left -= 1 + len(gaps)
        return found


def closed_chains(
    gaps: Sequence[tuple[int, ...]], users: int, think_ms: Distribution | None, draws: Draws
) -> list[Chain]:
    """Conversation i is that of user i modulo `users`, after the user's last one. All start with a pause, so that users
    who think do not come at once."""
    if users < 1:
        raise UsageError(f"a closed loop needs one user at least, not {users}")
    think = _function(think_ms)
    return [Chain(_pause_ns(think, draws), found, i - users if i >= users else None) for i, found in enumerate(gaps)]


def in_order(chains: Sequence[Chain]) -> list[tuple[int, int]]:
    """(chain, call) in the order in which calls would be sent if answers took no time."""
    due: list[tuple[int, int, int]] = []
    ends: list[int] = []
    for number, chain in enumerate(chains):
        t_ns = chain.start_ns + (0 if chain.after is None else ends[chain.after])
        due.append((t_ns, number, 0))
        for call, gap in enumerate(chain.gaps_ns, 1):
            t_ns += gap
            due.append((t_ns, number, call))
        ends.append(t_ns)
    return [(number, call) for _, number, call in sorted(due)]


def next_turn(before: Sequence[Segment], reply: Segment, own_key: int, num_tokens: int) -> tuple[Segment, ...]:
    """A prompt of `num_tokens` that says again what was said, as far as it fits, and then something new.

    What does not fit is left out at the end, where a real client would rather cut the beginning: then nothing would be
    shared at all.
    """
    room = max(0, num_tokens - min(LEAST_OWN, max(1, num_tokens // 2)))
    kept: list[Segment] = []
    for segment in (*before, reply):
        piece = min(segment.num_tokens, room)
        if piece < segment.num_tokens and piece < LEAST_PIECE:
            break
        kept.append(Segment(segment.key, piece, segment.role))
        room -= piece
        if piece < segment.num_tokens:
            break
    return (*kept, Segment(own_key, num_tokens - sum(s.num_tokens for s in kept)))


def _function(distribution: Distribution | None) -> QuantileFunction | None:
    return None if distribution is None else QuantileFunction(distribution)


def _count(function: QuantileFunction | None, draws: Draws) -> int:
    return 1 if function is None else function.count(draws.uniform())


def _pause_ns(function: QuantileFunction | None, draws: Draws) -> int:
    return 0 if function is None else round(function(draws.uniform()) * NS_PER_MS)


def _mean_count(function: QuantileFunction | None, num_points: int = 2000) -> float:
    if function is None:
        return 1.0
    return sum(function.count((i + 0.5) / num_points) for i in range(num_points)) / num_points

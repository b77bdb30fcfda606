"""Which requests share how much of their beginning, so that the run has the declared prefix reuse.

Requests of one group begin with the same text; request i takes its first p_i tokens from it. Of a group's shared
tokens, each is new exactly once, so the tokens that repeat an earlier prefix number

    sum of all p_i  -  sum over the groups of the largest p_i in it

whatever the order of arrival. All p_i are the same length P, or what a shorter request has room for (at least its
last token is its own). The count of repeats never falls as P grows, so bisection finds P; single tokens then close
the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 16
MIN_REQUESTS_PER_GROUP = 24
NO_GROUP = -1


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """Per request: its group's number (NO_GROUP without shared prefix) and the number of shared tokens."""

    groups: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def num_repeated(self) -> int:
        """Tokens that repeat an earlier prefix of the same group."""
        return repeats(self.groups, self.tokens)


def repeats(groups: Sequence[int], tokens: Sequence[int]) -> int:
    longest: dict[int, int] = {}
    for group, shared in zip(groups, tokens, strict=True):
        longest[group] = max(longest.get(group, 0), shared)
    return sum(tokens) - sum(longest.values())


def plan_prefixes(lengths: Sequence[int], reuse: float, order: Sequence[int]) -> PrefixPlan:
    """Groups and shared lengths for requests of `lengths` tokens, given in order of arrival.

    `order` is a random permutation that deals requests to groups. As many groups as the reuse leaves room for. When
    the lengths do not allow the reuse at all (few requests, one giant), the plan is the nearest possible.
    """
    count = len(lengths)
    target = round(reuse * sum(lengths))
    if target <= 0 or count == 0:
        return PrefixPlan((NO_GROUP,) * count, (0,) * count)
    room = [length - 1 for length in lengths]
    num_groups = max(1, min(MAX_GROUPS, count // MIN_REQUESTS_PER_GROUP))
    while num_groups > 1 and repeats(_deal(order, num_groups), room) < target:
        num_groups //= 2
    groups = _deal(order, num_groups)
    tokens = _shared_lengths(room, groups, target)
    return PrefixPlan(tuple(g if t else NO_GROUP for g, t in zip(groups, tokens, strict=True)), tuple(tokens))


def _deal(order: Sequence[int], num_groups: int) -> list[int]:
    return [position % num_groups for position in order]


def _shared_lengths(room: Sequence[int], groups: Sequence[int], target: int) -> list[int]:
    low, high = 0, max(room)
    while low < high:
        middle = (low + high + 1) // 2
        if repeats(groups, [min(middle, r) for r in room]) <= target:
            low = middle
        else:
            high = middle - 1
    tokens = [min(low, r) for r in room]
    missing = target - repeats(groups, tokens)
    extended: set[int] = set()
    for index, group in enumerate(groups):
        if missing <= 0:
            break
        if room[index] > low:
            tokens[index] += 1
            if group in extended:  # the first one only makes the group's new text a token longer
                missing -= 1
            extended.add(group)
    return tokens

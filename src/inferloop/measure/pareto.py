"""Which of several measured things nobody would choose: another one is at least as good in everything that counts, and
certainly better in something. What chance explains counts as equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Better = bool | None
"""Whether one is better than another in some figure; None: no difference beyond chance."""


def dominates(calls: Sequence[Better]) -> bool:
    """Of the calls figure by figure: none against, and one at least in favour."""
    return False not in calls and True in calls


def dominated_by(num: int, calls: Callable[[int, int], Sequence[Better]]) -> list[int | None]:
    """Of each of `num` things, the first one that dominates it; None on the Pareto front. `calls(i, j)`: whether i is
    better than j, figure by figure; empty where the two cannot be compared."""
    return [next((i for i in range(num) if i != j and dominates(calls(i, j))), None) for j in range(num)]

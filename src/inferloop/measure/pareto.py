"""Which of several measured rows nobody would choose: another one is at least as good in everything, and better in
something."""

from __future__ import annotations

from collections.abc import Sequence


def dominated_by(rows: Sequence[Sequence[float | None]]) -> list[int | None]:
    """Of each row, the index of the first row that dominates it; None on the Pareto front. Less is better in every
    column (negate what should be large). A row with a None is not ranked: it neither dominates nor is dominated.
    Raises ValueError for rows of unequal length."""
    if len({len(row) for row in rows}) > 1:
        raise ValueError("the rows have unequal length")
    whole = [None if any(v is None for v in row) else tuple(v for v in row if v is not None) for row in rows]
    return [
        next(
            (
                j
                for j, other in enumerate(whole)
                if mine is not None
                and other is not None
                and other != mine
                and all(a <= b for a, b in zip(other, mine, strict=True))
            ),
            None,
        )
        for mine in whole
    ]

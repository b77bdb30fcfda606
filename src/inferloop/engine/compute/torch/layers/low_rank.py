"""Low-rank updates of matrices, each for some rows of a step (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from inferloop.engine.schedule.step import NO_ADAPTER, Int32, StepPlan


@dataclass(frozen=True, slots=True)
class LowRank:
    """Adds b @ a to a matrix; a (rank, in), b (out, rank)."""

    a: Tensor
    b: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in) -> (rows, out)."""
        return F.linear(F.linear(x, self.a), self.b)


@dataclass(frozen=True, slots=True)
class Adapted:
    """The slots of the adapters that rows go through, and of each its rows, which lie side by side. `whole`: an update
    is computed for all rows and kept for its own, so that what is computed has one shape, whoever else is there."""

    groups: tuple[tuple[int, slice], ...]
    whole: bool

    def add(self, updates: Mapping[int, LowRank], x: Tensor, y: Tensor) -> Tensor:
        """y with the updates of its rows, changed in place; x is what it was computed from."""
        for slot, rows in self.groups:
            update = updates.get(slot)
            if update is None:
                continue
            if self.whole:
                y[rows] += update(x)[rows]
            else:
                y[rows].addmm_(F.linear(x[rows], update.a), update.b.T)
        return y


def adapted_rows(plan: StepPlan, *, tile: int | None) -> tuple[Adapted | None, ...]:
    """Of the step's rows, or of every `tile` of them; None where no row is adapted."""
    if plan.adapters is None:
        return (None,) * (1 if tile is None else -(-plan.num_tokens // tile))
    slots = np.repeat(plan.adapters, np.diff(plan.offsets))
    parts = [slots] if tile is None else np.split(slots, np.arange(tile, len(slots), tile))
    return tuple(_adapted(part, whole=tile is not None) for part in parts)


def _adapted(slots: Int32, *, whole: bool) -> Adapted | None:
    """Runs of one slot: the scheduler has who goes through one adapter side by side."""
    cuts = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
    groups = [(int(slots[begin]), slice(begin, end)) for begin, end in pairwise(cuts) if slots[begin] != NO_ADAPTER]
    return Adapted(tuple(groups), whole) if groups else None

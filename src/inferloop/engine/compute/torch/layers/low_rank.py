"""Low-rank updates of matrices, each for some rows of a step (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
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
    """The slots of the adapters that rows go through, and of each the rows. `whole`: an update is computed for all rows
    and kept for its own, so that what is computed has one shape, whoever else is there."""

    groups: tuple[tuple[int, Tensor], ...]
    whole: bool

    def add(self, updates: Mapping[int, LowRank], x: Tensor, y: Tensor) -> Tensor:
        """y with the updates of its rows, changed in place; x is what it was computed from."""
        for slot, rows in self.groups:
            update = updates.get(slot)
            if update is not None:
                y.index_add_(0, rows, update(x)[rows] if self.whole else update(x[rows]))
        return y


def adapted_rows(plan: StepPlan, device: torch.device, *, tile: int | None) -> tuple[Adapted | None, ...]:
    """Of the step's rows, or of every `tile` of them; None where no row is adapted."""
    if plan.adapters is None:
        return (None,) * (1 if tile is None else -(-plan.num_tokens // tile))
    slots = np.repeat(plan.adapters, np.diff(plan.offsets))
    parts = [slots] if tile is None else np.split(slots, np.arange(tile, len(slots), tile))
    return tuple(_adapted(part, device, whole=tile is not None) for part in parts)


def _adapted(slots: Int32, device: torch.device, *, whole: bool) -> Adapted | None:
    present = [int(slot) for slot in np.unique(slots) if slot != NO_ADAPTER]
    groups = [(slot, torch.from_numpy(np.flatnonzero(slots == slot)).to(device)) for slot in present]
    return Adapted(tuple(groups), whole) if groups else None

"""Where the ranks of a tensor-parallel model meet. A rank alone has nobody to meet."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


class Group(Protocol):
    """The ranks that each hold a share of a model. All of them call the same methods in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """Of the same place on all ranks; may be written into `x`."""
        ...

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows (tokens, hidden) of the whole table, of which each rank has some rows."""
        ...

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Of the whole vocabulary, (rows, vocab), where `logits` are those of this rank's part of it. On the first
        rank; on others what comes back means nothing."""
        ...


class Alone:
    """The group of a model that one process has whole."""

    def sum(self, x: Tensor) -> Tensor:
        return x

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def whole_logits(self, logits: Tensor) -> Tensor:
        return logits


ALONE = Alone()

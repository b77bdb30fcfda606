"""What a step tells about its prompts: log-probabilities of the tokens that follow, and sums of hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from inferloop.engine.compute.torch.model import TILE_ROWS
from inferloop.engine.schedule.step import Float64, PromptRows, StepPlan, TokenLogprob

_ROWS_AT_ONCE = 64
"""A row of logits is as wide as the vocabulary: this many at a time bound the memory, and are whole tiles."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of some rows, on the device: values (rows,), ranks (rows,), and the likeliest (rows, widest), best first."""

    chosen: Tensor
    ranks: Tensor
    top_values: Tensor
    top_ids: Tensor


def score(hidden: Tensor, rows: PromptRows, logits_of: Callable[[Tensor], Tensor]) -> list[Scores]:
    """Of every row, in pieces; hidden (tokens, hidden) is that of the whole step, before the final norm."""
    targets = torch.from_numpy(rows.targets.astype(np.int64)).to(hidden.device)
    widest = int(rows.num_top.max())
    return [
        _score(hidden[some], wanted, widest, logits_of)
        for some, wanted in zip(rows_at_once(rows, hidden.device), torch.split(targets, _ROWS_AT_ONCE), strict=True)
    ]


def rows_at_once(rows: PromptRows, device: torch.device) -> tuple[Tensor, ...]:
    """Which of a step's tokens go through the head together, piece by piece."""
    return torch.split(torch.from_numpy(rows.flat.astype(np.int64)).to(device), _ROWS_AT_ONCE)


def logits_of_tiles(hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """In whole tiles of rows, because each row count that packed weights meet costs memory for good."""
    return logits_of(F.pad(hidden, (0, 0, 0, -len(hidden) % TILE_ROWS)))[: len(hidden)]


def _score(hidden: Tensor, targets: Tensor, widest: int, logits_of: Callable[[Tensor], Tensor]) -> Scores:
    logits = logits_of_tiles(hidden, logits_of).float()
    own = logits.gather(1, targets[:, None])
    table = torch.log_softmax(logits, -1)
    top_values, top_ids = table.topk(min(widest, table.shape[-1]), dim=-1)
    return Scores(table.gather(1, targets[:, None])[:, 0], (logits > own).sum(-1) + 1, top_values, top_ids)


def read_scores(parts: list[Scores], rows: PromptRows) -> tuple[TokenLogprob, ...]:
    """Fetch them; one for each of `rows`."""
    found: list[TokenLogprob] = []
    for part in parts:
        chosen, ranks = part.chosen.tolist(), part.ranks.tolist()
        for i, (values, ids) in enumerate(zip(part.top_values.tolist(), part.top_ids.tolist(), strict=True)):
            num_top = int(rows.num_top[len(found)])
            top = tuple(zip(ids[:num_top], values[:num_top], strict=True))
            found.append(TokenLogprob(chosen[i], top, rank=ranks[i]))
    return tuple(found)


def rows_to_pool(plan: StepPlan) -> list[slice]:
    """The flat tokens of each sequence of `plan.pooled`."""
    some = plan.pooled if plan.pooled is not None else np.empty(0, np.int32)
    return [slice(int(plan.offsets[i]), int(plan.offsets[i + 1])) for i in some]


def add_up(parts: list[Tensor]) -> Float64 | None:
    """The sum of each part's rows; in fp64, where the order of adding shows far below what fp32 can tell."""
    if not parts:
        return None
    return np.stack([part.cpu().double().sum(0).numpy() for part in parts])

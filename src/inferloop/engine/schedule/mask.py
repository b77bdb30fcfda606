"""What the schedule knows of structured output: something that says which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from inferloop.engine.schedule.step import UInt32


class Mask(Protocol):
    """State of one sequence's answer, owned by the sequence. It follows the tokens, not the cache: preemption, which
    keeps the tokens, leaves it as it is."""

    @property
    def failed(self) -> bool:
        """It can no longer tell what may follow; the sequence ends as an error."""
        ...

    def fill(self, row: UInt32) -> None:
        """Write the allowed next tokens, packed as in SamplingColumns.mask: at least one. The end token is among them
        exactly when the answer may end here, and alone when it must."""
        ...

    def accept(self, token_ids: list[int]) -> None:
        """Move on over sampled tokens, an end token included."""
        ...


class MaskFiller:
    """Computes a step's masks beside the step: sampling, which needs them, comes last in it. One thread of its own,
    which the first mask starts. What is filled must not be moved on before its result was taken."""

    def __init__(self) -> None:
        self._executor: Executor | None = None

    def fill(self, masks: Sequence[Mask | None], vocab_size: int) -> Future[UInt32] | None:
        """One packed row for each, all of it allowed where there is no mask; None when there is none at all."""
        if not any(mask is not None for mask in masks):
            return None
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="inferloop-masks")
        return self._executor.submit(_filled, masks, -(-vocab_size // 32))

    def close(self) -> None:
        """End the thread, once it is through with what it has."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)


def _filled(masks: Sequence[Mask | None], num_words: int) -> UInt32:
    rows = np.full((len(masks), num_words), 0xFFFF_FFFF, np.uint32)
    for mask, row in zip(masks, rows, strict=True):
        if mask is not None:
            mask.fill(row)
    return rows

"""What the schedule knows of structured output: something that says which tokens may come next."""

from __future__ import annotations

from typing import Protocol

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

"""A step while it is decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferloop.engine.schedule.build import Chunk
from inferloop.engine.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepChanges:
    """Request ids that a step moved between queue and running."""

    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()


@dataclass(slots=True)
class Outline:
    """What is in so far, and what still fits: `budget` tokens, of which `prefill` beyond decoding."""

    budget: int
    prefill: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    slots: set[int] = field(default_factory=set)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

    @property
    def changes(self) -> StepChanges:
        return StepChanges(tuple(self.admitted), tuple(self.preempted))

    def decode(self, sequence: Sequence) -> None:
        self._take(sequence, 1)
        self.budget -= len(sequence.drafts)

    def extend(self, sequence: Sequence) -> None:
        """As much of what is known and not computed as still fits."""
        num = min(self.budget, self.prefill, sequence.num_known - sequence.num_computed)
        if num:
            self._take(sequence, num)
            self.prefill -= num

    def _take(self, sequence: Sequence, num: int) -> None:
        self.chunks.append((sequence, num))
        self.slots.add(sequence.slot)
        self.budget -= num

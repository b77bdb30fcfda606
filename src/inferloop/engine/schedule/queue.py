"""Who waits, in the order in which they will be let in."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from inferloop.engine.schedule.sequence import Sequence


class WaitQueue:
    """A heap by `Sequence.order`, which does not change while a sequence waits: ageing is in it already."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        """In no order."""
        return (sequence for _, sequence in self._heap)

    @property
    def head(self) -> Sequence | None:
        return self._heap[0][1] if self._heap else None

    def in_order(self) -> list[Sequence]:
        """All of them, the head first."""
        return [sequence for _, sequence in sorted(self._heap, key=lambda entry: entry[0])]

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.order, sequence))

    def pop(self) -> Sequence:
        """Take the head out."""
        return heapq.heappop(self._heap)[1]

    def remove(self, sequence: Sequence) -> None:
        """Take one out of the middle, which must be there."""
        place = next(i for i, (_, other) in enumerate(self._heap) if other is sequence)
        self._heap[place] = self._heap[-1]
        self._heap.pop()
        heapq.heapify(self._heap)

    def check(self) -> None:
        """Assert that it is a heap."""
        orders = [order for order, _ in self._heap]
        assert all(orders[(i - 1) // 2] <= orders[i] for i in range(1, len(orders))), "not a heap"
        assert orders == [sequence.order for sequence in self], "an order changed in the queue"

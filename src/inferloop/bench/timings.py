"""Rows of a window, made when somebody asks for one: until then a request is the bytes that its sender told of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from inferloop.bench.exchange import Outcome
from inferloop.bench.messages import outcomes_in
from inferloop.measure.timing import RequestTiming


class Timings(Sequence[RequestTiming]):
    """Some 100 bytes for a plain answer and 9 more for each chunk, where a row takes 700. Equal to a list of the same
    rows. Each look makes its row anew: make a list of what is looked at often."""

    __slots__ = ("_data", "_row", "_starts")

    def __init__(self, data: bytes | bytearray, row: Callable[[Outcome], RequestTiming]) -> None:
        """`data` is what `messages.add_outcome` made; it must not change any more."""
        self._data, self._row = data, row
        self._starts = array("Q", (start for start, _ in outcomes_in(data)))

    @overload
    def __getitem__(self, place: int) -> RequestTiming: ...
    @overload
    def __getitem__(self, place: slice) -> list[RequestTiming]: ...
    def __getitem__(self, place: int | slice) -> RequestTiming | list[RequestTiming]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        for _, outcome in outcomes_in(self._data, self._starts[place]):
            return self._row(outcome)
        raise IndexError(place)

    def __iter__(self) -> Iterator[RequestTiming]:
        return (self._row(outcome) for _, outcome in outcomes_in(self._data))

    def __len__(self) -> int:
        return len(self._starts)

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, list | Timings):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} timings>"

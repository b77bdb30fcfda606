"""The chunks of a streamed answer, kept small: a run has millions of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

_MAX_BYTE = 255


class Chunk(NamedTuple):
    """One streamed frame with tokens: arrival (monotonic ns, stamped before parsing) and how many tokens."""

    t_ns: int
    num_tokens: int


class Chunks(Sequence[Chunk]):
    """Equal to a tuple of the same chunks, at 9 bytes a chunk where that takes some 100. Not to be changed."""

    __slots__ = ("counts", "times_ns")

    def __init__(self, times_ns: Sequence[int], counts: Sequence[int]) -> None:
        """Raises ValueError when there are not as many of both."""
        if len(times_ns) != len(counts):
            raise ValueError(f"{len(times_ns)} times and {len(counts)} counts")
        self.times_ns = array("q", times_ns)
        small = not counts or (max(counts) <= _MAX_BYTE and min(counts) >= 0)
        self.counts: Sequence[int] = bytes(counts) if small else array("q", counts)

    @overload
    def __getitem__(self, place: int) -> Chunk: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, place: int | slice) -> Chunk | tuple[Chunk, ...]:
        if isinstance(place, slice):
            return tuple(map(Chunk, self.times_ns[place], self.counts[place]))
        return Chunk(self.times_ns[place], self.counts[place])

    def __iter__(self) -> Iterator[Chunk]:
        return map(Chunk, self.times_ns, self.counts)

    def __len__(self) -> int:
        return len(self.times_ns)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Chunks):
            return self.times_ns == other.times_ns and list(self.counts) == list(other.counts)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Chunks({list(self.times_ns)}, {list(self.counts)})"


def times_of(chunks: Sequence[Chunk]) -> Sequence[int]:
    """Arrivals alone."""
    return chunks.times_ns if isinstance(chunks, Chunks) else [c.t_ns for c in chunks]


def counts_of(chunks: Sequence[Chunk]) -> Sequence[int]:
    """Numbers of tokens alone."""
    return chunks.counts if isinstance(chunks, Chunks) else [c.num_tokens for c in chunks]

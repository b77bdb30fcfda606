"""The stamps of many requests as arrays, so that a run of millions of chunks is condensed in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inferloop.core.units import NS_PER_MS
from inferloop.measure.chunks import counts_of, times_of

if TYPE_CHECKING:
    from inferloop.measure.timing import RequestTiming

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CENSORED = "censored"
NOT_THE_SERVICE = frozenset({"http_4xx", "client"})
"""Error classes that say nothing about the service."""
OK, FAILED, CUT, NOT_OURS = range(4)
ABSENT = np.iinfo(np.int64).min


@dataclass(frozen=True, eq=False)
class Columns:
    """One entry per request; `ABSENT` where there is no stamp. Chunks of all requests lie one after another: those of
    request i are `offsets[i]:offsets[i + 1]`. Times in monotonic ns."""

    intended: Ints
    send: Ints
    end: Ints
    first_answer: Ints
    queue_ms: Floats
    """NaN where the server does not tell."""
    status: npt.NDArray[np.int8]
    """OK, FAILED, CUT (unfinished at the cut-off), NOT_OURS (an error that says nothing about the service)."""
    offsets: Ints
    chunk_t: Ints
    chunk_n: Ints

    @classmethod
    def of(cls, requests: Sequence[RequestTiming] | Columns) -> Columns:
        """What is columns already is returned as it is."""
        if isinstance(requests, Columns):
            return requests
        n = len(requests)
        offsets = np.zeros(n + 1, np.int64)
        np.cumsum(np.fromiter((len(r.chunks) for r in requests), np.int64, n), out=offsets[1:])
        times = chain.from_iterable(times_of(r.chunks) for r in requests)
        counts = chain.from_iterable(counts_of(r.chunks) for r in requests)
        return cls(
            intended=_stamps((r.t_intended_ns for r in requests), n),
            send=_stamps((r.t_send_ns for r in requests), n),
            end=_stamps((r.t_end_ns for r in requests), n),
            first_answer=_stamps((r.t_first_answer_ns for r in requests), n),
            queue_ms=np.fromiter((np.nan if r.queue_ms is None else r.queue_ms for r in requests), np.float64, n),
            status=np.fromiter((status_of(r.error) for r in requests), np.int8, n),
            offsets=offsets,
            chunk_t=np.fromiter(times, np.int64, int(offsets[-1])),
            chunk_n=np.fromiter(counts, np.int64, int(offsets[-1])),
        )

    def __len__(self) -> int:
        return len(self.send)

    @cached_property
    def has_chunks(self) -> Bools:
        return np.diff(self.offsets) > 0

    @cached_property
    def first(self) -> Ints:
        """The first chunk with tokens."""
        return self._at(self.offsets[:-1])

    @cached_property
    def last(self) -> Ints:
        return self._at(self.offsets[1:] - 1)

    @cached_property
    def owner(self) -> Ints:
        """The request that each chunk belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @cached_property
    def gap_at(self) -> Ints:
        """The chunks before which there is a gap: all but the first of each request."""
        later = np.ones(len(self.chunk_t), np.bool_)
        later[self.offsets[:-1][self.has_chunks]] = False
        return np.flatnonzero(later)

    @cached_property
    def gap_ms(self) -> Floats:
        return (self.chunk_t[self.gap_at] - self.chunk_t[self.gap_at - 1]) / NS_PER_MS

    @cached_property
    def gap_owner(self) -> Ints:
        return self.owner[self.gap_at]

    @cached_property
    def tokens_later(self) -> Ints:
        """Tokens after the first chunk, per request."""
        return np.bincount(self.gap_owner, self.chunk_n[self.gap_at], len(self)).astype(np.int64)

    def start(self, *, from_intended: bool) -> Ints:
        """The send, or the intended instant where there is one."""
        return np.where(self.intended == ABSENT, self.send, self.intended) if from_intended else self.send

    def _at(self, index: Ints) -> Ints:
        out = np.full(len(self), ABSENT, np.int64)
        out[self.has_chunks] = self.chunk_t[index[self.has_chunks]]
        return out


def status_of(error: str | None) -> int:
    if error is None:
        return OK
    if error == CENSORED:
        return CUT
    return NOT_OURS if error in NOT_THE_SERVICE else FAILED


def _stamps(values: object, n: int) -> Ints:
    return np.fromiter((ABSENT if v is None else v for v in values), np.int64, n)  # type: ignore[attr-defined]

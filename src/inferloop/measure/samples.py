"""A metric's samples over a set of requests: what was seen, what failed, what the cut-off hid.

Failures never leave the distribution: a request that failed counts as +inf in every latency. A request that was
unfinished at the cut-off is right-censored: its value is only known to exceed the time that had passed. Mistakes of the
caller (http_4xx) and faults of the load generator (client) say nothing about the service; they are left out here and
counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.columns import ABSENT, CENSORED, CUT, FAILED, NOT_THE_SERVICE, OK, Bools, Columns, Floats, Ints
from inferloop.measure.timing import READING_TOK_S, RequestTiming

__all__ = [
    "CENSORED",
    "ERROR_CLASSES",
    "METRICS",
    "NOT_THE_SERVICE",
    "Samples",
    "collect",
    "concerns_service",
    "is_failure",
]

ERROR_CLASSES = (
    "http_4xx",
    "http_429",
    "http_5xx",
    "connect",
    "timeout",
    "truncated",
    "empty_stream",
    "protocol",
    "client",
)
Requests = Sequence[RequestTiming] | Columns
_FROM_USER = ("ttft_ms", "ttfat_ms", "ttlt_ms")
"""What has a form that counts from the intended instant."""


def concerns_service(r: RequestTiming) -> bool:
    """False for errors that the caller or the load generator made."""
    return r.error not in NOT_THE_SERVICE


def is_failure(r: RequestTiming) -> bool:
    """Whether it spends the service's error budget."""
    return r.error is not None and r.error != CENSORED and concerns_service(r)


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """In ms. Each sample is owned by a request, given by its index. `num_requests` is the number of requests behind all
    of them: the independent observations."""

    values: Floats
    owners: Ints
    failed_owners: Ints
    """Of the samples that failures stand for; a request is there once for each."""
    hidden: Floats
    """Lower bounds of what the cut-off hid."""
    hidden_owners: Ints
    num_requests: int

    @property
    def num_failed(self) -> int:
        return len(self.failed_owners)

    @property
    def num_total(self) -> int:
        return len(self.values) + self.num_failed + len(self.hidden)

    def adjusted(self) -> Floats:
        """Sorted ascending, failures and hidden values as +inf: what percentiles are taken of."""
        return np.concatenate([np.sort(self.values), np.full(self.num_failed + len(self.hidden), np.inf)])

    def pessimistic(self) -> tuple[Floats, Ints]:
        """(values, owners), hidden ones as +inf."""
        infinite = np.full(self.num_failed + len(self.hidden), np.inf)
        owners = np.concatenate([self.owners, self.failed_owners, self.hidden_owners])
        return np.concatenate([self.values, infinite]), owners

    def optimistic(self) -> tuple[Floats, Ints]:
        """(values, owners), hidden ones as the time that had passed."""
        values = np.concatenate([self.values, np.full(self.num_failed, np.inf), self.hidden])
        return values, np.concatenate([self.owners, self.failed_owners, self.hidden_owners])

    def owned_by(self, chosen: Bools) -> Samples:
        """Those of the chosen requests alone. Of a metric with one sample per request."""
        kept = [chosen[owners] for owners in (self.owners, self.failed_owners, self.hidden_owners)]
        failed, hidden_owners = self.failed_owners[kept[1]], self.hidden_owners[kept[2]]
        num = int(kept[0].sum()) + len(failed) + len(hidden_owners)
        return Samples(self.values[kept[0]], self.owners[kept[0]], failed, self.hidden[kept[2]], hidden_owners, num)

    def num_over(self, limit: float) -> tuple[int, int]:
        """(certainly, possibly) over the limit."""
        cut_over = int(np.count_nonzero(self.hidden > limit))
        certain = self.num_failed + int(np.count_nonzero(self.values > limit)) + cut_over
        return certain, certain + len(self.hidden) - cut_over


def collect(metric: str, requests: Requests, *, from_intended: bool = False) -> Samples:
    """Samples of `metric` (a key of `METRICS`). `from_intended` counts TTFT, TTFAT and TTLT from the instant the
    request should have been sent, where there is one. Gaps are pooled over the requests; there a failed or unfinished
    request weighs as many as a successful one has on average. Raises KeyError for an unknown metric."""
    c = Columns.of(requests)
    all_values, all_owners = METRICS[metric](c, from_intended and metric in _FROM_USER)
    whose = c.status[all_owners]
    values, owners = all_values[whose == OK], all_owners[whose == OK]
    num_told = int(np.count_nonzero(np.bincount(owners, minlength=len(c)))) if len(owners) else 0
    # A failed answer tells no queue time; that alone proves nothing.
    failed = np.flatnonzero(c.status == FAILED) if metric != "queue_ms" else np.zeros(0, np.int64)
    weight = max(1, round(len(values) / num_told)) if num_told else 1
    cut = np.flatnonzero(c.status == CUT)
    if not len(cut):
        none = np.zeros(0)
        return Samples(values, owners, np.repeat(failed, weight), none, none.astype(np.int64), num_told + len(failed))
    seen_owners = all_owners[whose == CUT]
    bounds, bound_owners = _hidden(metric, c, cut, seen_owners, from_intended, weight)
    told_by_cut = len(np.union1d(seen_owners, bound_owners))
    return Samples(
        np.concatenate([values, all_values[whose == CUT]]),
        np.concatenate([owners, seen_owners]),
        np.repeat(failed, weight),
        bounds,
        bound_owners,
        num_told + len(failed) + told_by_cut,
    )


def _hidden(metric: str, c: Columns, cut: Ints, seen: Ints, from_intended: bool, weight: int) -> tuple[Floats, Ints]:
    """(lower bounds of what the requests `cut` would still have told, their owners). `seen` owns what they did tell."""
    elapsed = np.maximum(0, c.end[cut] - c.start(from_intended=from_intended and metric in _FROM_USER)[cut]) / NS_PER_MS
    if metric == "queue_ms":
        return np.zeros(0), np.zeros(0, np.int64)
    if metric in ("ttft_ms", "ttfat_ms"):
        unseen = ~np.isin(cut, seen)
        return elapsed[unseen], cut[unseen]
    if metric == "ttlt_ms":
        return elapsed, cut
    since_last = np.where(c.has_chunks[cut], (c.end[cut] - c.last[cut]) / NS_PER_MS, 0.0)
    if metric in ("itl_ms", "icl_ms"):  # the gap it was cut in, and of what else it would have told nothing is known
        more = np.maximum(0, weight - 1 - np.bincount(seen, minlength=len(c))[cut])
        bounds = np.concatenate([since_last, np.zeros(int(more.sum()))])
        return bounds, np.concatenate([cut, np.repeat(cut, more)])
    return (since_last if metric == "max_gap_ms" else np.zeros(len(cut))), cut


def _between(start: Ints, stop: Ints) -> tuple[Floats, Ints]:
    known = np.flatnonzero((start != ABSENT) & (stop != ABSENT))
    return (stop[known] - start[known]) / NS_PER_MS, known


def _finished(c: Columns, per_request: tuple[Floats, Ints]) -> tuple[Floats, Ints]:
    """Of a request that was cut off the value is not known yet."""
    values, owners = per_request
    done = c.status[owners] != CUT
    return values[done], owners[done]


def _tpot(c: Columns, _: bool) -> tuple[Floats, Ints]:
    known = np.flatnonzero(c.tokens_later > 0)
    return _finished(c, ((c.last[known] - c.first[known]) / NS_PER_MS / c.tokens_later[known], known))


def _itl(c: Columns, _: bool) -> tuple[Floats, Ints]:
    num = c.chunk_n[c.gap_at]
    return np.repeat(c.gap_ms / num, num), np.repeat(c.gap_owner, num)


def _queue(c: Columns, _: bool) -> tuple[Floats, Ints]:
    known = np.flatnonzero(~np.isnan(c.queue_ms))
    return c.queue_ms[known], known


def _max_gap(c: Columns, _: bool) -> tuple[Floats, Ints]:
    known, starts = np.unique(c.gap_owner, return_index=True)
    largest = np.maximum.reduceat(c.gap_ms, starts) if len(known) else np.zeros(0)
    return _finished(c, (largest, known))


def _blocked(c: Columns, _: bool) -> tuple[Floats, Ints]:
    """The reader starts with the first chunk; at chunk i it has waited for t_i - t_0 less the reading time of all
    chunks before i, or longer if it had to wait for an earlier one."""
    known = np.flatnonzero(c.has_chunks)
    read_before = np.concatenate([[0], np.cumsum(c.chunk_n)[:-1]]) if len(c.chunk_n) else np.zeros(0)
    begin = c.offsets[:-1]
    since_first = (c.chunk_t - c.chunk_t[begin[c.owner]]) / NS_PER_MS
    reading = (read_before - read_before[begin[c.owner]]) / READING_TOK_S * (NS_PER_S / NS_PER_MS)
    waited = np.maximum.reduceat(since_first - reading, begin[known]) if len(known) else np.zeros(0)
    return _finished(c, (np.maximum(waited, 0.0), known))


METRICS: dict[str, Callable[[Columns, bool], tuple[Floats, Ints]]] = {
    "ttft_ms": lambda c, intended: _between(c.start(from_intended=intended), c.first),
    "ttfat_ms": lambda c, intended: _between(c.start(from_intended=intended), c.first_answer),
    "ttlt_ms": lambda c, intended: _finished(c, _between(c.start(from_intended=intended), c.last)),
    "tpot_ms": _tpot,
    "itl_ms": _itl,
    "icl_ms": lambda c, _: (c.gap_ms, c.gap_owner),
    "max_gap_ms": _max_gap,
    "blocked_ms": _blocked,
    "queue_ms": _queue,
}
"""(values, owners) of each metric, whatever became of the requests."""

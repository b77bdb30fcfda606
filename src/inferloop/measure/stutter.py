"""What a reader of streamed answers sees: not a percentile but a sequence, which stops now and then."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferloop.measure.columns import OK, Columns
from inferloop.measure.samples import Requests
from inferloop.measure.timing import stutter_probability

STALL_MS = 250.0
"""A pause between chunks that a reader notices."""


@dataclass(frozen=True, slots=True)
class Stutter:
    """Of the successful answers with at least two chunks.

    `gap_share` is p, the share of gaps between chunks above `stall_ms`; `expected` is 1-(1-p)^T for an answer with the
    median number of gaps T, as if stalls were independent; `observed` is the share of answers that really stalled.
    Stalls come in bunches, so `observed` is usually the lower one; when it is the higher one, a few answers are not the
    cause.
    """

    stall_ms: float
    num_answers: int
    gap_share: float
    num_gaps_median: int
    expected: float
    observed: float


def stutter(requests: Requests, *, stall_ms: float = STALL_MS) -> Stutter | None:
    """None when no answer has two chunks."""
    c = Columns.of(requests)
    good = c.status[c.gap_owner] == OK
    gaps, owners = c.gap_ms[good], c.gap_owner[good]
    if not len(gaps):
        return None
    slow = gaps > stall_ms
    num_gaps = np.bincount(owners)
    answers = num_gaps > 0
    share = float(np.mean(slow))
    median = int(np.sort(num_gaps[answers])[int(answers.sum()) // 2])
    return Stutter(
        stall_ms=stall_ms,
        num_answers=int(answers.sum()),
        gap_share=share,
        num_gaps_median=median,
        expected=stutter_probability(share, median),
        observed=float(np.mean(np.bincount(owners, slow)[answers] > 0)),
    )

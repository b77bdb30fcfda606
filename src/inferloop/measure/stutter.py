"""What a reader of streamed answers sees: not a percentile but a sequence, which stops now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferloop.measure.timing import RequestTiming, icl_ms, stutter_probability

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


def stutter(requests: Sequence[RequestTiming], *, stall_ms: float = STALL_MS) -> Stutter | None:
    """None when no answer has two chunks."""
    answers = [gaps for r in requests if r.ok and (gaps := icl_ms(r))]
    if not answers:
        return None
    num_gaps = sum(map(len, answers))
    share = sum(gap > stall_ms for gaps in answers for gap in gaps) / num_gaps
    median = sorted(map(len, answers))[len(answers) // 2]
    return Stutter(
        stall_ms=stall_ms,
        num_answers=len(answers),
        gap_share=share,
        num_gaps_median=median,
        expected=stutter_probability(share, median),
        observed=sum(max(gaps) > stall_ms for gaps in answers) / len(answers),
    )

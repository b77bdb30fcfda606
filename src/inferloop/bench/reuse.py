"""What a prefix cache could have reused in a window, by when prompts were computed there and when others came."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from inferloop.bench.render import RenderedRequest
from inferloop.contract.reuse import Beginnings
from inferloop.measure.timing import RequestTiming

_MOST_BLOCK = 256
"""Tokens. Where all prompts share equally much, their counts alone would tell any length."""


def reusable_share(
    planned: Sequence[RenderedRequest],
    positions: Sequence[int],
    timings: Sequence[RequestTiming],
    measured: Sequence[RequestTiming],
) -> float:
    """Of the input tokens of `measured`, the share that a cache without limits would have had before they came.

    `timings` are all of the window, with their `positions` in the plan. Only what was certainly there counts: a prompt
    is in the cache once its first token has come, so requests that are sent together have nothing of each other. A
    cache gives whole blocks, as long a power of two as all the counts it tells are multiples of, and never a prompt's
    last token. 0 without tokens.
    """
    wanted = {t.request_id for t in measured}
    block = _block(t.num_cached_tokens for t in timings)
    events = [(t.chunks[0].t_ns, 0, i) for i, t in enumerate(timings) if t.chunks]
    events += [(t.t_send_ns, 1, i) for i, t in enumerate(timings) if t.request_id in wanted]
    seen, reusable, total = Beginnings(), 0, 0
    for _, is_send, i in sorted(events):
        request = planned[positions[i]]
        if not is_send:
            seen.add(request.timed)
            continue
        total += request.num_input_tokens
        reusable += max(0, min(seen.shared(request.timed), request.num_input_tokens - 1)) // block * block
    return reusable / total if total else 0.0


def _block(counts: Iterable[int]) -> int:
    common = math.gcd(*counts)
    return min(common & -common, _MOST_BLOCK) or 1

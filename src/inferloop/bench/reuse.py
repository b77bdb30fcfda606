"""What a prefix cache did in a window, what the workload declares, and what it could have reused there: by when prompts
were computed and when others came."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from inferloop.bench.render import RenderedRequest
from inferloop.contract.reuse import Beginnings
from inferloop.measure.timing import RequestTiming

TOLERANCE = 0.1
"""Of the input tokens: closer than this is as declared, or as possible."""
_MOST_BLOCK = 256
"""Tokens. Where all prompts share equally much, their counts alone would tell any length."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Shares of the `num_input` input tokens of the answers that succeeded: what came from the cache (None: no answer
    tells; then `possible` and `in_blocks` are not known either, and 0), what the workload repeats, and what a cache
    without limits would have had before it was asked for: by token, and in whole blocks as long as this cache's.
    `repeated` is what these requests, and not all of the workload, begin with as one sent before them does."""

    num_input: int
    cached: float | None
    declared: float
    possible: float
    in_blocks: float
    block: int = 1
    repeated: float = 0.0

    @classmethod
    def joined(cls, parts: Sequence[Reuse]) -> Reuse | None:
        """Of several windows of one target. None without any."""
        if not parts:
            return None
        total = sum(p.num_input for p in parts)

        def mean(values: Iterable[float]) -> float:
            return sum(p.num_input * value for p, value in zip(parts, values, strict=True)) / total

        told = [p.cached for p in parts if p.cached is not None]
        return cls(
            total,
            mean(told) if len(told) == len(parts) else None,
            mean(p.declared for p in parts),
            mean(p.possible for p in parts),
            mean(p.in_blocks for p in parts),
            max(p.block for p in parts),
            mean(p.repeated for p in parts),
        )

    @property
    def verdict(self) -> str:
        """as declared | less | not told; more than is declared makes a window void."""
        if self.cached is None:
            return "not told"
        return "less" if self.cached < self.declared - TOLERANCE else "as declared"

    @property
    def reason(self) -> str:
        """What keeps it from what is declared, where it gets less."""
        if self.cached is None:
            return "no answer says how many of its input tokens came from the cache"
        if self.verdict == "as declared":
            return ""
        if self.possible < self.declared - TOLERANCE and self.cached >= self.possible - TOLERANCE:
            return "requests came before what they share had been computed"
        if not self.cached:
            return "it reused nothing"
        if self.cached >= self.in_blocks - TOLERANCE:
            return f"its cache keeps whole blocks of {self.block} tokens"
        return "its cache is too small, or requests go past it"

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("declared", "possible", "cached", "verdict", "reason")}


def reuse_of(
    planned: Sequence[RenderedRequest],
    positions: Sequence[int],
    timings: Sequence[RequestTiming],
    measured: Sequence[RequestTiming],
    declared: float,
    *,
    is_told: bool,
) -> Reuse | None:
    """Of those of `measured` that succeeded; None without any. `timings` are all of the window, with their `positions`
    in the plan; `declared` is the share that the workload repeats. `is_told`: answers say what came from the cache.

    Only what was certainly there was possible: a prompt is in the cache once its first token has come, so requests
    that are sent together have nothing of each other. A cache gives whole blocks, as long a power of two as all the
    counts it tells are multiples of, and never a prompt's last token.
    """
    done = {t.request_id: t for t in measured if t.ok}
    num_input = sum(t.num_input_tokens for t in done.values())
    if not num_input:
        return None
    if not is_told:
        return Reuse(num_input, None, declared, 0.0, 0.0)
    block = _block(t.num_cached_tokens for t in timings)
    events = [(t.chunks[0].t_ns, 0, i) for i, t in enumerate(timings) if t.chunks]
    events += [(t.t_send_ns, 1, i) for i, t in enumerate(timings)]
    seen, sent = Beginnings(), Beginnings()
    total, repeated, possible, in_blocks = 0, 0, 0, 0
    for _, is_send, i in sorted(events):
        request = planned[positions[i]]
        if not is_send:
            seen.add(request.timed)
            continue
        if timings[i].request_id in done:
            total += request.num_input_tokens
            repeated += min(sent.shared(request.timed), request.num_input_tokens)
            shared = max(0, min(seen.shared(request.timed), request.num_input_tokens - 1))
            possible += shared
            in_blocks += shared // block * block
        sent.add(request.timed)
    num_cached = sum(t.num_cached_tokens for t in done.values())
    return Reuse(
        num_input, num_cached / num_input, declared, possible / total, in_blocks / total, block, repeated / total
    )


def _block(counts: Iterable[int]) -> int:
    common = math.gcd(*counts)
    return min(common & -common, _MOST_BLOCK) or 1

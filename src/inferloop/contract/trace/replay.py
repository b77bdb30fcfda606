"""A recorded trace to a workload of the same times, lengths and shared prefixes; never of the same words.

Names of blocks and sessions become keys by a hash with the run's seed, so nothing of the trace can be read from what is
sent. Times are multiplied by the scale of the contract, and gaps keep their proportions: a burst stays a burst.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from inferloop.contract.chains import next_turn
from inferloop.contract.draws import seed_of
from inferloop.contract.trace.detect import READERS, detect
from inferloop.contract.trace.record import MAX_REQUESTS, CountTokens, Recorded, estimate_tokens
from inferloop.contract.workload import TraceSource
from inferloop.core.errors import TraceError
from inferloop.core.request import Segment


@dataclass(frozen=True, slots=True)
class Replayed:
    """A request of the trace, made ready: `at_s` and `end_s` (None where not told) from the start of the window."""

    at_s: float | None
    end_s: float | None
    segments: tuple[Segment, ...]
    output_tokens: int
    traffic_class: str
    session: str | None


@dataclass(frozen=True, slots=True)
class Trace:
    """`num_skipped`: failed or empty in the trace, or longer than the context where those are to be skipped.

    `tells_prefixes`: blocks or sessions say what prompts share.
    """

    requests: tuple[Replayed, ...]
    num_clipped: int
    num_skipped: int
    tells_prefixes: bool
    num_later: int = 0
    """Requests that come after the time that was asked for."""


def read_trace(
    source: TraceSource,
    *names: str | int,
    num_requests: int | None = None,
    duration_s: float | None = None,
    context_limit: int | None = None,
    count: CountTokens | None = None,
) -> Trace:
    """The first requests of the trace in order of arrival. `names` (seed, stream) go into every key.

    `count` is the target's tokenizer, for traces of texts; else four bytes are a token. Raises UsageError, TraceError.
    """
    path = Path(source.path)
    kind = detect(path) if source.format == "auto" else source.format
    most = min(n for n in (num_requests, source.max_requests, MAX_REQUESTS + 1) if n is not None)
    found: list[Recorded] = []
    num_skipped = num_clipped = num_later = 0
    # What comes that long after any other is later than the window, whichever turns out to be the first.
    window_s = math.inf if duration_s is None else duration_s / source.time_scale
    earliest_s = math.inf
    for recorded in READERS[kind](path, count or estimate_tokens):
        if recorded.input_tokens < 1 or recorded.output_tokens < 1:
            num_skipped += 1
            continue
        fitting = _fit(recorded, context_limit)
        if fitting is not recorded and source.max_context == "skip":
            num_skipped += 1
            continue
        num_clipped += fitting is not recorded
        at_s = recorded.at_s
        earliest_s = earliest_s if at_s is None else min(earliest_s, at_s)
        if at_s is not None and at_s - earliest_s > window_s:
            num_later += 1
        else:
            found.append(fitting)
        if len(found) + num_later >= most:
            break
    if len(found) + num_later > MAX_REQUESTS:
        raise TraceError(f"has more than {MAX_REQUESTS} requests", file=str(path), hint="give max_requests")
    if not found:
        raise TraceError("holds no request that can be replayed", file=str(path))
    timed = _timed(found, source.time_scale)
    num_timed = len(timed)
    if duration_s is not None:
        timed = [r for r in timed if r.at_s is None or r.at_s < duration_s]
    tells = any(r.blocks or r.session is not None for r in timed)
    num_later += num_timed - len(timed)
    return Trace(tuple(_prompts(timed, names)), num_clipped, num_skipped, tells, num_later)


def _fit(recorded: Recorded, limit: int | None) -> Recorded:
    """The same request, or one that fits: its input shortened first, as a client that cuts its history does."""
    if limit is None or recorded.input_tokens + recorded.output_tokens <= limit:
        return recorded
    length_out = min(recorded.output_tokens, limit - 1)
    length_in = min(recorded.input_tokens, limit - length_out)
    return replace(recorded, input_tokens=length_in, output_tokens=length_out)


def _timed(found: list[Recorded], scale: float) -> list[Recorded]:
    """Ascending, from 0. Lines may be a little out of order, as writers of logs are."""
    timed = [(r.at_s, r) for r in found if r.at_s is not None]
    if len(timed) < len(found):
        return [replace(r, at_s=None, end_s=None) for r in found]
    timed.sort(key=lambda pair: pair[0])
    start_s = timed[0][0]
    return [
        replace(r, at_s=(t - start_s) * scale, end_s=None if r.end_s is None else (r.end_s - start_s) * scale)
        for t, r in timed
    ]


def _prompts(timed: Iterable[Recorded], names: tuple[str | int, ...]) -> Iterable[Replayed]:
    said: dict[str, Replayed] = {}
    for number, recorded in enumerate(timed):
        own = seed_of(*names, "trace", "content", number)
        session, length = recorded.session, recorded.input_tokens
        before = None if session is None else said.get(session)
        if recorded.blocks:
            segments = _blocks(recorded, own, names)
        elif before is not None and length > sum(s.num_tokens for s in before.segments):
            reply = Segment(seed_of(*names, "trace", "reply", number), before.output_tokens, "assistant")
            segments = next_turn(before.segments, reply, own, length)
        else:
            segments = (Segment(own, length),)
        made = Replayed(
            recorded.at_s, recorded.end_s, segments, recorded.output_tokens, recorded.traffic_class, session
        )
        if session is not None:
            said[session] = made
        yield made


def _blocks(recorded: Recorded, own: int, names: tuple[str | int, ...]) -> tuple[Segment, ...]:
    """One segment per block, the last as long as what is left; what no block names is the request's own."""
    segments: list[Segment] = []
    left, size = recorded.input_tokens, recorded.block_tokens
    for block in islice(recorded.blocks, -(-left // size)):
        num_tokens = min(size, left)
        segments.append(Segment(seed_of(*names, "trace", "block", block), num_tokens))
        left -= num_tokens
    return (*segments, Segment(own, left)) if left else tuple(segments)


def mean_rate(requests: tuple[Replayed, ...]) -> float | None:
    """Arrivals per second, (n - 1) / (last - first); None without times."""
    first, last = requests[0].at_s, requests[-1].at_s
    if first is None or last is None or last <= first:
        return None
    return (len(requests) - 1) / (last - first)

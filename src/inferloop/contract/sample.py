"""A contract to frozen, seeded requests: times, lengths, and the segments of prompts; no text.

The same contract, seed and stream give the same requests on every machine. Lengths, times and prefixes come from
streams of their own: the same seed at another rate is the same work, only closer together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from inferloop.contract.arrivals import AT_ONCE, OPEN_PROCESSES, arrival_times_ns
from inferloop.contract.chains import Chain, Loop, closed_chains, in_order, next_turn
from inferloop.contract.course import Course, course_of_profile, course_of_ramp
from inferloop.contract.draws import Draws, seed_of
from inferloop.contract.prefixes import NO_GROUP, PrefixPlan, plan_prefixes
from inferloop.contract.quantile import QuantileFunction
from inferloop.contract.reuse import measured_reuse
from inferloop.contract.trace.record import CountTokens
from inferloop.contract.trace.replay import Replayed, Trace, mean_rate, read_trace
from inferloop.contract.workload import Contract, Traffic, TrafficClass
from inferloop.core.errors import UsageError
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class SampledWorkload:
    """Requests in order of arrival, with what was done to them.

    `num_clipped` had to be shortened to fit the context, `num_skipped` of a trace were left out. `prefix_reuse` is the
    share of input tokens that repeat an earlier prefix of this workload; `declared_prefix_reuse` is the same as the
    contract wants it for this mix (of a trace: as measured). `offered_qps` is the rate that a trace has by itself;
    `num_later` of its requests come after the time that was asked for.
    """

    requests: tuple[TimedRequest, ...]
    num_clipped: int
    prefix_reuse: float
    declared_prefix_reuse: float
    num_skipped: int = 0
    offered_qps: float | None = None
    num_later: int = 0


def sample(
    contract: Contract,
    *,
    seed: int,
    num_requests: int | None = None,
    duration_s: float | None = None,
    qps: float | None = None,
    arrivals: str | None = None,
    stream: str = "",
) -> tuple[TimedRequest, ...]:
    """The requests of `sample_workload` without a context limit."""
    return sample_workload(
        contract,
        seed=seed,
        num_requests=num_requests,
        duration_s=duration_s,
        qps=qps,
        arrivals=arrivals,
        stream=stream,
    ).requests


def sample_workload(
    contract: Contract,
    *,
    seed: int,
    num_requests: int | None = None,
    duration_s: float | None = None,
    qps: float | None = None,
    arrivals: str | None = None,
    users: int | None = None,
    stream: str = "",
    context_limit: int | None = None,
    count_tokens: CountTokens | None = None,
) -> SampledWorkload:
    """`num_requests` requests, or those of `duration_s` seconds, in order of arrival.

    `qps`, of queries, defaults to the contract's average. `arrivals` is by default the contract's process:

        poisson, gamma, constant   open, at `qps`; a contract's ramp leads up to it
        profile                    open, along the contract's rate_profile with `qps` as its mean
        closed                     `users` (default: the contract's) with their think time
        burst, serial              queries all at once, or in the client's own time; conversations lose their pauses
        trace                      the contract's trace with its own times and lengths; `qps` only for one without times

    `stream` names the part of a run ("sweep/2/0"): another stream has other prompts, so that no part meets a cache that
    an earlier one has warmed. `context_limit` caps input plus output tokens. `count_tokens` is the
    target's tokenizer, for a trace of texts; else four bytes are a token. Raises UsageError for what cannot be sampled,
    TraceError with file and line.
    """
    if num_requests is not None and num_requests < 1:
        raise UsageError(f"num_requests must be at least 1, not {num_requests}")
    if duration_s is not None and not 0 < duration_s < float("inf"):
        raise UsageError(f"duration_s must be above 0, not {duration_s}")
    if context_limit is not None and context_limit < 2:
        raise UsageError(f"context_limit must leave room for one token in and one out, not {context_limit}")
    traffic = contract.traffic
    process = arrivals or traffic.arrivals.process
    if process == "trace":
        source = traffic.arrivals.trace
        if source is None:
            raise UsageError("the contract names no trace to replay")
        trace = read_trace(
            source,
            seed,
            stream,
            num_requests=num_requests,
            duration_s=duration_s,
            context_limit=context_limit,
            count=count_tokens,
        )
        return _replay(trace, traffic, seed, stream, qps)
    chains = _chains(traffic, process, seed, stream, num_requests, duration_s, qps, users)
    classes = _deal_classes(traffic.classes, len(chains), Draws(seed, stream, "classes"))
    prompts: dict[tuple[int, int], _Prompt] = {}
    num_clipped, wanted, total = 0, 0.0, 0
    for part in traffic.classes:
        members = [i for i, name in enumerate(classes) if name == part.name]
        sizes = [chains[i].num_calls for i in members]
        lengths, clipped = _lengths(part, sum(sizes), context_limit, seed, stream)
        num_clipped += clipped
        tokens = sum(length_in for length_in, _ in lengths)
        wanted += part.prefix_reuse * tokens
        total += tokens
        dealt = _deal_lengths(lengths, sizes)
        order = Draws(seed, stream, part.name, "prefixes").order(len(members))
        plan = _plan_heads(dealt, part.prefix_reuse * tokens, part.prefix_reuse, order)
        for number, calls, group, shared in zip(members, dealt, plan.groups, plan.tokens, strict=True):
            own = Segment(seed_of(seed, stream, "content", number), calls[0][0] - shared)
            key = seed_of(seed, stream, "group", part.name, group)
            segments: tuple[Segment, ...] = (own,) if group == NO_GROUP else (Segment(key, shared), own)
            for call, (_, length_out) in enumerate(calls):
                if call:
                    reply = Segment(seed_of(seed, stream, "reply", number, call - 1), calls[call - 1][1], "assistant")
                    key = seed_of(seed, stream, "content", number, call)
                    segments = next_turn(segments, reply, key, calls[call][0])
                prompts[number, call] = _Prompt(segments, length_out, part.name)
    requests = _in_time(chains, prompts, is_chained=process not in AT_ONCE)
    return SampledWorkload(requests, num_clipped, measured_reuse(requests), wanted / total if total else 0.0)


def expected_starts_s(requests: Sequence[TimedRequest]) -> list[float]:
    """When each request would be sent, after the start of the window, if answers took no time."""
    starts: dict[int, float] = {}
    for request in requests:
        starts[request.index] = request.at_s + (0.0 if request.after is None else starts[request.after])
    return list(starts.values())


def _replay(trace: Trace, traffic: Traffic, seed: int, stream: str, qps: float | None) -> SampledWorkload:
    """Requests as the trace has them in time. Conversations without times begin as a Poisson process and pause as the
    contract says; where a trace is silent about what prompts share, they share what the contract declares."""
    found = trace.requests
    prompts = [r.segments for r in found]
    declared: float | None = None
    if not trace.tells_prefixes:
        lengths, declared = [r.segments[0].num_tokens for r in found], traffic.prefix_reuse
        plan = plan_prefixes(lengths, declared, Draws(seed, stream, "prefixes").order(len(found)))
        for i, (group, shared) in enumerate(zip(plan.groups, plan.tokens, strict=True)):
            if group != NO_GROUP:
                own = Segment(found[i].segments[0].key, lengths[i] - shared)
                prompts[i] = (Segment(seed_of(seed, stream, "group", "trace", group), shared), own)
    requests = _untimed(found, traffic, seed, stream, qps) if found[0].at_s is None else _timed(found, prompts)
    reuse = measured_reuse(requests)
    return SampledWorkload(
        *(requests, trace.num_clipped, reuse, reuse if declared is None else declared, trace.num_skipped),
        *(mean_rate(found), trace.num_later),
    )


def _timed(found: Sequence[Replayed], prompts: Sequence[tuple[Segment, ...]]) -> tuple[TimedRequest, ...]:
    """At the instants of the trace; but a later turn of a conversation follows the end of the one before, whenever that
    is here, after the pause that there was: from that one's end, or from its start where no end is told."""
    turns = Counter(r.session for r in found if r.session is not None)
    numbers = {name: number for number, name in enumerate(turns)}
    last: dict[str, int] = {}
    requests = []
    for i, (r, segments) in enumerate(zip(found, prompts, strict=True)):
        at_s, after, number = r.at_s or 0.0, None, None
        if r.session is not None and turns[r.session] > 1:
            after, number = last.get(r.session), numbers[r.session]
            last[r.session] = i
        if after is not None:
            before = found[after]
            at_s = max(0.0, at_s - ((before.at_s or 0.0) if before.end_s is None else before.end_s))
        at_s = round(at_s * NS_PER_S) / NS_PER_S
        requests.append(TimedRequest(i, at_s, segments, r.output_tokens, r.traffic_class, after, number))
    return tuple(requests)


def _untimed(
    found: tuple[Replayed, ...], traffic: Traffic, seed: int, stream: str, qps: float | None
) -> tuple[TimedRequest, ...]:
    members: dict[str, list[Replayed]] = {}
    for i, request in enumerate(found):
        members.setdefault(request.session or f"#{i}", []).append(request)
    calls = list(members.values())
    rate = (traffic.qps.avg if qps is None else qps) * len(calls) / len(found)
    draws = Draws(seed, stream, "arrivals")
    starts_ns = arrival_times_ns("poisson", qps=rate, cv=1.0, num_requests=len(calls), duration_s=None, draws=draws)
    loop = Loop(traffic, seed, stream)
    chains = [
        Chain(start, loop.pauses_ns(i, len(c) - 1)) for i, (start, c) in enumerate(zip(starts_ns, calls, strict=True))
    ]
    prompts = {
        (i, k): _Prompt(r.segments, r.output_tokens, r.traffic_class)
        for i, c in enumerate(calls)
        for k, r in enumerate(c)
    }
    return _in_time(chains, prompts, is_chained=True)


class _Prompt(NamedTuple):
    segments: tuple[Segment, ...]
    output_tokens: int
    traffic_class: str


def _chains(
    traffic: Traffic,
    process: str,
    seed: int,
    stream: str,
    num_requests: int | None,
    duration_s: float | None,
    qps: float | None,
    users: int | None,
) -> list[Chain]:
    """Who asks when. Conversations arrive so much more rarely than queries as they have calls."""
    loop = Loop(traffic, seed, stream)
    if process == "closed":
        users = traffic.arrivals.users if users is None else users
        if num_requests is None or users is None:
            raise UsageError("closed arrivals need a number of requests and of users")
        think_ms = traffic.arrivals.think_ms
        return closed_chains(loop.sizes(num_requests), users, think_ms, Draws(seed, stream, "think"))
    sizes = None if num_requests is None else loop.sizes(num_requests)
    course: Course | None = None
    if process == "profile":
        if traffic.rate_profile is None:
            raise UsageError("the contract has no rate_profile to follow")
        process, course = traffic.arrivals.process, course_of_profile(traffic.rate_profile)
        process = process if process in OPEN_PROCESSES else "poisson"
    elif traffic.arrivals.ramp is not None and process in OPEN_PROCESSES:
        course = course_of_ramp(traffic.arrivals.ramp)
    rate = traffic.qps.avg if qps is None else qps
    starts_ns = arrival_times_ns(
        process,
        qps=rate if loop.is_single else rate / loop.mean_calls,
        cv=traffic.arrivals.cv,
        num_requests=None if sizes is None else len(sizes),
        duration_s=duration_s,
        draws=Draws(seed, stream, "arrivals"),
        course=course,
    )
    gaps = sizes or [loop.gaps_ns(i) for i in range(len(starts_ns))]
    return [Chain(start_ns, found) for start_ns, found in zip(starts_ns, gaps, strict=False)]


def _deal_lengths(lengths: list[tuple[int, int]], sizes: list[int]) -> list[list[tuple[int, int]]]:
    """Each conversation's share of the lengths, its prompts from the shortest to the longest: they grow, while all
    together keep their distribution."""
    dealt = []
    start = 0
    for size in sizes:
        part = lengths[start : start + size]
        start += size
        if size > 1:
            part = list(zip(sorted(i for i, _ in part), (o for _, o in part), strict=True))
        dealt.append(part)
    return dealt


def _plan_heads(dealt: list[list[tuple[int, int]]], wanted: float, share: float, order: list[int]) -> PrefixPlan:
    """Shared beginnings of first calls, for what the later calls of each conversation do not repeat anyway."""
    heads = [calls[0][0] for calls in dealt]
    if all(len(calls) == 1 for calls in dealt):
        return plan_prefixes(heads, share, order)
    repeated = 0
    for calls in dealt:
        segments: tuple[Segment, ...] = (Segment(0, calls[0][0]),)
        for (before_in, before_out), (length_in, _) in pairwise(calls):
            segments = next_turn(segments, Segment(1, before_out, "assistant"), 2, length_in)
            repeated += min(before_in, length_in - segments[-1].num_tokens)
    return plan_prefixes(heads, max(0.0, wanted - repeated) / max(1, sum(heads)), order)


def _in_time(
    chains: list[Chain], prompts: dict[tuple[int, int], _Prompt], *, is_chained: bool
) -> tuple[TimedRequest, ...]:
    """Requests with their numbers, in order; chains keep who follows whom unless they all come at once."""
    order = in_order(chains)
    index_of = {place: index for index, place in enumerate(order)}
    requests = []
    for index, (number, call) in enumerate(order):
        chain, prompt = chains[number], prompts[number, call]
        after, at_ns = None, chain.start_ns
        if call:
            after, at_ns = index_of[number, call - 1], chain.gaps_ns[call - 1]
        elif chain.after is not None:
            after = index_of[chain.after, chains[chain.after].num_calls - 1]
        requests.append(
            TimedRequest(
                index=index,
                at_s=at_ns / NS_PER_S if is_chained else 0.0,
                segments=prompt.segments,
                output_tokens=prompt.output_tokens,
                traffic_class=prompt.traffic_class,
                after=after if is_chained else None,
                session=number if is_chained and chain.num_calls > 1 else None,
            )
        )
    return tuple(requests)


def _deal_classes(classes: tuple[TrafficClass, ...], count: int, draws: Draws) -> list[str]:
    """The class of each request: shares are met as closely as whole requests allow, in random order."""
    if len(classes) == 1:
        return [classes[0].name] * count
    edges: list[tuple[float, str]] = []
    total = 0.0
    for part in classes:
        total += part.share
        edges.append((total, part.name))
    return [next((name for edge, name in edges if u * total < edge), edges[-1][1]) for u in draws.stratified(count)]


def _lengths(
    part: TrafficClass, count: int, limit: int | None, seed: int, stream: str
) -> tuple[list[tuple[int, int]], int]:
    """(input, output) lengths, and how many had to be clipped to `limit` tokens in all."""
    inputs, outputs = QuantileFunction(part.input_tokens), QuantileFunction(part.output_tokens)
    quantiles_in = Draws(seed, stream, part.name, "input").stratified(count)
    quantiles_out = Draws(seed, stream, part.name, "output").stratified(count)
    drawn = [(inputs.count(a), outputs.count(b)) for a, b in zip(quantiles_in, quantiles_out, strict=True)]
    if limit is None:
        return drawn, 0
    fitting = [_clip(length_in, length_out, limit) for length_in, length_out in drawn]
    return fitting, sum(a != b for a, b in zip(drawn, fitting, strict=True))


def _clip(length_in: int, length_out: int, limit: int) -> tuple[int, int]:
    """Shorten the input first, as a client that cuts its history does; the answer only where that is not enough."""
    length_out = min(length_out, limit - 1)
    return min(length_in, limit - length_out), length_out

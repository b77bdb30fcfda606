"""A contract to frozen, seeded requests: times, lengths, and the segments of prompts; no text.

The same contract, seed and stream give the same requests on every machine. Lengths, times and prefixes come from
streams of their own: the same seed at another rate is the same work, only closer together.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferloop.contract.arrivals import arrival_times_ns
from inferloop.contract.draws import Draws, seed_of
from inferloop.contract.prefixes import NO_GROUP, plan_prefixes
from inferloop.contract.quantile import QuantileFunction
from inferloop.contract.reuse import measured_reuse
from inferloop.contract.workload import Contract, TrafficClass
from inferloop.core.errors import UsageError
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class SampledWorkload:
    """Requests in order of arrival, with what was done to them.

    `num_clipped` had to be shortened to fit the context. `prefix_reuse` is the share of input tokens that repeat an
    earlier prefix of this workload; `declared_prefix_reuse` is the same as the contract wants it for this mix.
    """

    requests: tuple[TimedRequest, ...]
    num_clipped: int
    prefix_reuse: float
    declared_prefix_reuse: float


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
    stream: str = "",
    context_limit: int | None = None,
) -> SampledWorkload:
    """`num_requests` requests, or those of `duration_s` seconds, in order of arrival.

    `qps` defaults to the contract's average. `arrivals` is poisson, gamma, constant, burst, serial or closed, by
    default the contract's process. `stream` names the part of a run ("sweep/2/0"): another stream has other
    prompts, so that no part meets a cache that an earlier one has warmed. `context_limit` caps input plus output
    tokens. Raises UsageError for what cannot be sampled.
    """
    if num_requests is not None and num_requests < 1:
        raise UsageError(f"num_requests must be at least 1, not {num_requests}")
    if duration_s is not None and not 0 < duration_s < float("inf"):
        raise UsageError(f"duration_s must be above 0, not {duration_s}")
    if context_limit is not None and context_limit < 2:
        raise UsageError(f"context_limit must leave room for one token in and one out, not {context_limit}")
    traffic = contract.traffic
    times_ns = arrival_times_ns(
        arrivals or traffic.arrivals.process,
        qps=traffic.qps.avg if qps is None else qps,
        cv=traffic.arrivals.cv,
        num_requests=num_requests,
        duration_s=duration_s,
        draws=Draws(seed, stream, "arrivals"),
    )
    classes = _deal_classes(traffic.classes, len(times_ns), Draws(seed, stream, "classes"))
    slots: dict[int, TimedRequest] = {}
    num_clipped = 0
    wanted = 0.0
    for part in traffic.classes:
        members = [i for i, name in enumerate(classes) if name == part.name]
        lengths, clipped = _lengths(part, len(members), context_limit, seed, stream)
        num_clipped += clipped
        inputs = [length_in for length_in, _ in lengths]
        wanted += part.prefix_reuse * sum(inputs)
        order = Draws(seed, stream, part.name, "prefixes").order(len(members))
        plan = plan_prefixes(inputs, part.prefix_reuse, order)
        for index, (length_in, length_out), group, shared in zip(
            members, lengths, plan.groups, plan.tokens, strict=True
        ):
            own = Segment(seed_of(seed, stream, "content", index), length_in - shared)
            key = seed_of(seed, stream, "group", part.name, group)
            slots[index] = TimedRequest(
                index=index,
                at_s=times_ns[index] / NS_PER_S,
                segments=(own,) if group == NO_GROUP else (Segment(key, shared), own),
                output_tokens=length_out,
                traffic_class=part.name,
            )
    requests = tuple(slots[i] for i in range(len(times_ns)))
    total = sum(r.input_tokens for r in requests)
    return SampledWorkload(requests, num_clipped, measured_reuse(requests), wanted / total if total else 0.0)


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

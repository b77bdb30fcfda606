"""Whether a point's numbers may be used: the load generator examines itself before it judges a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferloop.bench.drive import DriveResult
from inferloop.bench.render import RenderedRequest
from inferloop.bench.reuse import TOLERANCE, Reuse, reuse_of
from inferloop.bench.window import TICK_NS
from inferloop.core.slo import Slo
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure import little
from inferloop.measure.quantiles import min_samples, quantile
from inferloop.measure.samples import ERROR_CLASSES, NOT_THE_SERVICE, collect
from inferloop.measure.timing import RequestTiming, schedule_delay_ms

_RATE_TOLERANCE = 0.01
_MISCOUNTED_SHARE = 0.01
_LENGTH_TOLERANCE = 0.1
_MOST_SHOWN = 160
"""Characters of what a server said of a failure."""
_LEAST_DELAY_MS = 10.0
_GAUGE_LAG_S = 0.002
"""The gauge falls when the client's loop comes round to it, a little after the last byte was stamped."""
_DELAY_SHARE = 0.05
_MOST_CPU, _MUCH_CPU = 0.9, 0.7
"""Of one core, that a sender uses: beyond, its own queue is part of what it measures."""
_LEAST_LAGS = 100
"""Ticks of the loop below which no p99 of its lag is taken, unless most of them never came."""


@dataclass(frozen=True, slots=True)
class Checks:
    """`void`: reasons why the numbers must not be used. `notes`: what a reader should know. `reuse`: what the prefix
    cache did, None without an answer."""

    void: tuple[str, ...]
    notes: tuple[str, ...]
    reuse: Reuse | None = None


def self_checks(
    result: DriveResult,
    measured: Sequence[RequestTiming],
    planned: Sequence[RenderedRequest],
    slo: Slo,
    declared_reuse: float,
    *,
    is_compared: bool = False,
    exact_lengths: bool = True,
) -> Checks:
    """`measured` are the point's requests without warm-up; `declared_reuse` is the share of input tokens that this
    workload repeats. `is_compared`: a cache that holds less than it could is part of what is compared, and is left to
    whoever tells of `reuse`. `exact_lengths`: answers were to be as long as the workload has them; else their lengths
    are noted."""
    late = [_schedule(result, planned), _delay(measured, slo), _lag(result, measured, slo)]
    found = [
        *late,
        _little(result),
        *_counts(result),
        _pauses(result, measured, slo),
        _busy(result),
        _clients_fault(result),
        _pool(result),
    ]
    is_told = result.num_telling_cache > 0
    seen = reuse_of(planned, result.positions, result.timings, measured, declared_reuse, is_told=is_told)
    notes = []
    if seen is not None:
        cold, note = _cold(seen)
        found += [_warm(seen), None if is_compared else cold]
        notes += [note] if note and not is_compared else []
    notes += [
        f"{name}, for example: {result.details[name][:_MOST_SHOWN]}"
        for name in ERROR_CLASSES
        if name in result.details and name not in NOT_THE_SERVICE
    ]
    length = _answer_lengths(result)
    if length is not None:
        if exact_lengths:
            found.append(f"{length}: the target ends them when it likes, which --no-ignore-eos lets it do")
        else:
            notes.append(length)
    uncounted = result.counted_by["frames"]
    if uncounted:
        notes.append(
            f"{uncounted} of {sum(result.counted_by.values())} answers came without the number of their tokens: each "
            "chunk is taken for one, which makes TPOT and tokens/s wrong where chunks hold several"
        )
    busiest = max((s.cpu_share for s in result.senders), default=0.0)
    if _MUCH_CPU < busiest <= _MOST_CPU:
        notes.append(f"the load generator was busy for {busiest:.0%} of the time: give it more senders")
    if any(late) and any(s.priority == "normal" for s in result.senders):
        notes.append(
            "the load generator ran at ordinary priority, so that others may have held it up: allow it real-time "
            "priority (ulimit -r), or leave it a core"
        )
    num_stale = sum(s.num_stale_retries for s in result.senders)
    if num_stale:
        notes.append(
            f"{num_stale} requests were sent again: the server had closed the idle connection they went out on"
        )
    num_left = sum(s.num_left_open for s in result.senders)
    if num_left:
        notes.append(
            f"the server left {num_left} answers open: after their [DONE] the HTTP body did not end, so that their "
            "connections could not be used again"
        )
    if result.num_capped:
        notes.append(f"the limit on requests in flight held back sends {result.num_capped} times")
    clipped = sum(r.clipped for r in planned)
    if clipped:
        notes.append(
            f"{clipped} of {len(planned)} prompts are longer than sampled: a chat has its template's tokens at least"
        )
    return Checks(tuple(text for text in found if text), tuple(notes), seen)


def _schedule(result: DriveResult, planned: Sequence[RenderedRequest]) -> str | None:
    """Sends against plan. What was not sent because the window ended early is not held against the client."""
    if result.num_forgone:
        longest = max(stall.late_ns for stall in result.stalls) / NS_PER_S
        return (
            f"schedule not honoured: the client stalled for {longest:.2f} s and gave up {result.num_forgone} requests"
        )
    sends = sorted((t.t_intended_ns, t.t_send_ns) for t in result.timings if t.t_intended_ns is not None)
    if len(sends) < 2:
        return None
    intended_ns, sent_ns = sends[-1][0] - sends[0][0], sends[-1][1] - sends[0][1]
    if intended_ns <= 0:
        return None
    ratio = intended_ns / sent_ns if sent_ns > 0 else 1.0
    if abs(ratio - 1.0) > _RATE_TOLERANCE and abs(sent_ns - intended_ns) > _LEAST_DELAY_MS * 1e6:
        return f"schedule not honoured: sent {ratio:.1%} of the rate asked for"
    return None


def _delay(measured: Sequence[RequestTiming], slo: Slo) -> str | None:
    """Late sends count in the response latencies, so they cannot flatter; beyond this they measure the client."""
    delays = sorted(d for r in measured if (d := schedule_delay_ms(r)) is not None)
    if not delays:
        return None
    q = 0.99 if len(delays) >= min_samples(0.99) else 0.95
    late_ms = quantile(delays, q)
    allowed_ms = _allowed_ms(measured, slo)
    if late_ms > allowed_ms:
        return f"schedule not honoured: p{q * 100:g} of sends is {late_ms:.0f} ms late, {allowed_ms:.0f} ms are allowed"
    return None


def _allowed_ms(measured: Sequence[RequestTiming], slo: Slo) -> float:
    """A small part of the TTFT that is to be told, by its limit or by its median, whichever is larger."""
    seen = sorted(collect("ttft_ms", measured).values)
    scales = [o.limit for o in slo.objectives if o.metric == "ttft_ms"] + ([quantile(seen, 0.5)] if seen else [])
    return max(_LEAST_DELAY_MS, _DELAY_SHARE * max(scales, default=0.0))


def _lag(result: DriveResult, measured: Sequence[RequestTiming], slo: Slo) -> str | None:
    """How late the senders' own loops came round: any arrival may have waited so long for its stamp."""
    allowed_ms = _allowed_ms(measured, slo)
    for sender in result.senders:
        lags, num_expected = sorted(sender.loop_lags_ns), sender.window_s * NS_PER_S / TICK_NS
        if len(lags) < _LEAST_LAGS and (num_expected < _LEAST_LAGS or len(lags) >= num_expected / 2):
            continue
        lag_ms = quantile(lags, 0.99) / NS_PER_MS if lags else sender.window_s * 1e3
        if lag_ms > allowed_ms:
            return f"the load generator's loop was {lag_ms:.0f} ms late at p99, {allowed_ms:.0f} ms are allowed"
    return None


def _pauses(result: DriveResult, measured: Sequence[RequestTiming], slo: Slo) -> str | None:
    """Of the senders' garbage collectors, though they are off in the window."""
    longest_ms = max((p for s in result.senders for p in s.collector_pauses_ns), default=0) / NS_PER_MS
    allowed_ms = _allowed_ms(measured, slo)
    if longest_ms <= allowed_ms:
        return None
    return f"a garbage collection held up the load generator for {longest_ms:.0f} ms, {allowed_ms:.0f} ms are allowed"


def _busy(result: DriveResult) -> str | None:
    busiest = max((s.cpu_share for s in result.senders), default=0.0)
    return f"the load generator used {busiest:.0%} of a core: give it more senders" if busiest > _MOST_CPU else None


def _little(result: DriveResult) -> str | None:
    """The client's gauge against the records."""
    if result.in_flight is None:
        return None
    law = little.check(result.timings, in_flight=result.in_flight)
    if law is None or law.ok:
        return None
    expected = law.arrivals_per_s * law.mean_time_s
    if abs(law.in_flight - expected) / law.arrivals_per_s < _GAUGE_LAG_S:
        return None
    return f"Little's law is off by {law.difference:.0%}: {law.in_flight:.2f} in flight, the records say {expected:.2f}"


def _counts(result: DriveResult) -> list[str | None]:
    num_ok = sum(result.counted_by.values())
    allowed = max(1, int(num_ok * _MISCOUNTED_SHARE)) if num_ok else 0
    out: list[str | None] = []
    if result.num_count_mismatches > allowed:
        out.append(f"{result.num_count_mismatches} of {num_ok} answers have other token counts by frame than by total")
    if result.num_length_mismatches > allowed:
        out.append(
            f"{result.num_length_mismatches} of {num_ok} prompts have another length at the server than was sent"
        )
    return out


def _answer_lengths(result: DriveResult) -> str | None:
    """Shorter answers than the workload's are less work, and make any service look fast."""
    told, asked = result.num_tokens_told, result.num_tokens_asked
    if not asked or abs(told / asked - 1.0) <= _LENGTH_TOLERANCE:
        return None
    return f"answers have {told / asked:.0%} of the tokens that were asked for"


def _clients_fault(result: DriveResult) -> str | None:
    for name, text in (("client", "failed in the load generator"), ("http_4xx", "were refused as wrong")):
        count = sum(t.error == name for t in result.timings)
        if count:
            return f"{count} requests {text}: {result.details.get(name, '')}".rstrip(": ")
    return None


def _pool(result: DriveResult) -> str | None:
    """In a closed loop such a wait shows nowhere else."""
    waits = sum(sender.num_pool_waits for sender in result.senders)
    return f"{waits} requests waited in the load generator for one of its connections" if waits else None


def _warm(reuse: Reuse) -> str | None:
    most = max(reuse.declared, reuse.repeated)  # a short window's requests may repeat more than the workload does
    if reuse.cached is None or reuse.cached <= most + TOLERANCE:
        return None
    return f"reuse_mismatch: {reuse.cached:.0%} of the input tokens came from the cache, {most:.0%} are the workload's"


def _cold(reuse: Reuse) -> tuple[str | None, str | None]:
    """(void, note) of a cache that held less than it could have: a service colder than the one that was declared looks
    slower than it is; one without a cache is what it is."""
    if reuse.cached is None:
        return None, f"{reuse.reason}: a warm one would not be seen"
    if reuse.cached >= reuse.in_blocks - TOLERANCE:
        return None, None
    if not reuse.cached:
        return (
            None,
            f"the server reused nothing, though {reuse.in_blocks:.0%} of the input tokens had been computed before",
        )
    return (
        f"reuse_mismatch: {reuse.cached:.0%} of the input tokens came from the cache, {reuse.in_blocks:.0%} had been "
        "computed before they were sent: the cache is too small, or requests go past it"
    ), None

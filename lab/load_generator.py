"""What one core of the load generator reaches against a server that costs next to nothing, on the other core.

    python -m lab.load_generator --rounds 3

Closed loops: plain answers, streams of 64 tokens in one write (whole) or in one write per token (fast), and paced ones
(20 ms, then 5 ms a token). Open loops: Poisson arrivals on paced streams, whose time to first token is known. Senders
and this process share one core. `server` is how busy the server was: well below 100 % it was not the bottleneck.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from lab.null_server import NullServer, null_server

from inferloop.bench.drive import DriveOptions, DriveResult, Endpoint, drive
from inferloop.bench.render import RenderedRequest
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.quantiles import quantile
from inferloop.measure.timing import RequestTiming, schedule_delay_ms, ttft_ms

_TRUE_TTFT_MS = 20.0
_TOKENS = 64
_SEGMENTS = (Segment(0, 20),)
_BODY = b'{"model":"null","messages":[{"role":"user","content":"%s"}],"max_tokens":64,"stream":true}' % (b"word " * 40)


@dataclass
class Seen:
    """Numbers of a window, taken as requests end, so that memory does not grow with it."""

    num_ok: int = 0
    num_failed: int = 0
    first_ns: int = 1 << 62
    last_ns: int = 0
    ttfts: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)

    def take(self, _: int, timing: RequestTiming) -> None:
        if timing.error is not None:
            self.num_failed += 1
            return
        self.num_ok += 1
        self.first_ns, self.last_ns = min(self.first_ns, timing.t_send_ns), max(self.last_ns, timing.t_end_ns)
        ttft, delay = ttft_ms(timing), schedule_delay_ms(timing)
        if ttft is not None:
            self.ttfts.append(ttft)
        if delay is not None:
            self.delays.append(delay)

    @property
    def per_s(self) -> float:
        return self.num_ok * NS_PER_S / max(1, self.last_ns - self.first_ns)


def rendered(path: str, timed: TimedRequest) -> RenderedRequest:
    return RenderedRequest(timed, sys.intern(f"/{path}/v1/chat/completions"), _BODY, 20, 0, False)


def requests(path: str, times_s: list[float]) -> list[RenderedRequest]:
    return [rendered(path, TimedRequest(i, t, _SEGMENTS, _TOKENS)) for i, t in enumerate(times_s)]


def closed(path: str, count: int, users: int) -> list[RenderedRequest]:
    """As many users who never pause, each with every `users`-th request."""
    after = [None if i < users else i - users for i in range(count)]
    return [rendered(path, TimedRequest(i, 0.0, _SEGMENTS, _TOKENS, after=a)) for i, a in enumerate(after)]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    rng, now, times = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(rate)) < seconds:
        times.append(now)
    return times


async def window(server: NullServer, plan: list[RenderedRequest], users: int, core: int) -> dict[str, float]:
    seen = Seen()
    options = DriveOptions(sender_cores=(core,), num_connections=users, keep_timings=False, cut_off_s=5.0)
    server_before, ours_before = server.cpu_s(), resource.getrusage(resource.RUSAGE_SELF)
    result: DriveResult = await drive(plan, Endpoint(server.url), options, on_done=seen.take)
    ours = resource.getrusage(resource.RUSAGE_SELF)
    if seen.num_failed or seen.num_ok != len(plan):
        raise SystemExit(f"{seen.num_failed} of {len(plan)} failed, {result.num_unsent} unsent: {result.details}")
    (stats,) = result.senders
    span_s = (seen.last_ns - seen.first_ns) / NS_PER_S
    found = {
        "per_s": seen.per_s,
        "tok_s": seen.per_s * _TOKENS,
        "sender": stats.cpu_s / span_s,
        "parent": (ours.ru_utime + ours.ru_stime - ours_before.ru_utime - ours_before.ru_stime) / span_s,
        "server": (server.cpu_s() - server_before) / span_s,
        "rss_mb": stats.peak_rss_bytes / 1e6,
        "parent_mb": ours.ru_maxrss / 1e3,
        "lag_p99": quantile(sorted(stats.loop_lags_ns), 0.99) / NS_PER_MS,
        "ttft_p50": quantile(sorted(seen.ttfts), 0.5),
        "ttft_p99": quantile(sorted(seen.ttfts), 0.99),
    }
    if seen.delays:
        found["late_p99"] = quantile(sorted(seen.delays), 0.99)
    if stats.timer_errors_ns:
        found["timer_p99"] = quantile(sorted(stats.timer_errors_ns), 0.99) / NS_PER_MS
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each open loop")
    parser.add_argument("--only", nargs="+")
    asked = parser.parse_args()
    ours, theirs = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {ours})
    plans: dict[str, tuple[Callable[[int], list[RenderedRequest]], int]] = {
        "plain": (lambda _: closed("plain", 60_000, 64), 64),
        "whole": (lambda _: closed("whole", 8_000, 64), 64),
        "fast": (lambda _: closed("fast", 8_000, 64), 64),
        "paced": (lambda _: closed("paced", 4_096, 1024), 1024),
        "open 50/s": (lambda seed: requests("paced", poisson(50.0, asked.seconds, seed)), 64),
        "open 200/s": (lambda seed: requests("paced", poisson(200.0, asked.seconds, seed)), 128),
    }
    rows: dict[str, list[dict[str, float]]] = {}
    with null_server(theirs) as server:
        for i in range(asked.rounds):
            for name, (make, users) in plans.items():
                if asked.only is None or name in asked.only:
                    rows.setdefault(name, []).append(asyncio.run(window(server, make(i), users, ours)))
    for name, found in rows.items():
        medians = {key: statistics.median(row[key] for row in found) for key in found[0]}
        shown = "  ".join(f"{key} {value:,.{0 if value >= 100 else 2}f}" for key, value in medians.items())
        print(f"{name:11} {shown}")
    print(f"true TTFT of the open loops: {_TRUE_TTFT_MS:g} ms")


if __name__ == "__main__":
    main()

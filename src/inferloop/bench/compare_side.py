"""One target of a comparison: what is known of it, how it is asked, and how it is kept from disturbing the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from inferloop.bench.drive import DriveOptions, DriveResult, Endpoint, OnDone, drive
from inferloop.bench.fresh_cache import FreshCache
from inferloop.bench.render import PromptCodec, RenderedRequest, Renderer, RenderOptions
from inferloop.bench.resident import Resident, at_rest, idle_share, is_restless
from inferloop.bench.target import Launched, TargetInfo
from inferloop.contract.draws import seed_of
from inferloop.core.digest import plain
from inferloop.core.request import TimedRequest
from inferloop.core.units import NS_PER_S
from inferloop.measure.timing import RequestTiming

_SETTLE_S = 0.1
"""Between the word to go on and the first request."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A target that is up. `name` is what the user called it, `flags` what it was started with; `setup` says all of
    how, and `process` are its processes, where it was started here."""

    name: str
    at: Endpoint | str
    model: str | None = None
    codec: PromptCodec | None = None
    flags: tuple[str, ...] = ()
    launched: Launched | None = None
    setup: Mapping[str, Any] | None = None
    process: Resident | None = None


@dataclass
class Runner:
    label: str
    contender: Contender
    info: TargetInfo
    codec: PromptCodec
    fresh: FreshCache
    salt: int
    """How often the same URL stands before it: it must not meet the prompts that those have left in its cache. 0 where
    a cache salt sees to that."""
    rest_timeout_s: float
    renderer: Renderer | None = None
    idle_cpu: float | None = None
    """Of one core, that it takes while nothing is asked of it; None where that cannot be seen."""
    is_held: bool = False
    """It is suspended while another is measured."""
    answer_s: float = 0.0
    """The longest answer while it was alone with one request."""
    bursts_qps: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def burst_qps(self) -> float | None:
        """What it completes of a burst, per second; None: nothing."""
        return sum(self.bursts_qps) / len(self.bursts_qps) if self.bursts_qps else None

    def make_renderer(self, way: RenderOptions) -> None:
        """Raises RequestError or UsageError where prompts of exact lengths cannot be made this way."""
        launched = self.contender.launched
        exact = launched.exact_length if launched and way.ignore_eos else {}
        self.renderer = Renderer(self.codec, replace(way, model=self.info.model, extra=exact))

    async def render(self, requests: Sequence[TimedRequest], salt: int, part: str) -> tuple[RenderedRequest, ...]:
        assert self.renderer is not None
        return await asyncio.to_thread(self.renderer.render, salted(requests, salt), self.fresh.fields(part))

    async def watch_idle(self) -> None:
        """See what it takes while idle, and hold it still from here on if that is more than a waiting server does."""
        process = self.contender.process
        if process is None:
            return
        await at_rest(process, self.rest_timeout_s)
        self.idle_cpu = await idle_share(process)
        if is_restless(self.idle_cpu):
            self.is_held = True
            process.suspend()
            self.notes.append(
                f"{self.label} takes {self.idle_cpu:.0%} of a core while idle: it is suspended while others are "
                "measured"
            )

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """It is this one's turn: it runs, and has come to rest when the next one begins."""
        process = self.contender.process
        if self.is_held and process is not None:
            process.resume()
            await asyncio.sleep(_SETTLE_S)
        try:
            yield
            if process is not None and not self.is_held and not await at_rest(process, self.rest_timeout_s):
                self.notes.append(
                    f"{self.label} still computed {self.rest_timeout_s:g} s after a window of it, and so in the next "
                    "one"
                )
        finally:
            if self.is_held and process is not None:
                process.suspend()

    async def drive(self, planned: Sequence[RenderedRequest], options: DriveOptions, on_done: OnDone) -> DriveResult:
        async with self.turn():
            await self.fresh.empty()
            return await drive(planned, self.info.endpoint, options, on_done=on_done)

    def learn(self, timings: Sequence[RequestTiming]) -> None:
        """From requests that were sent one after another."""
        self.answer_s = max([self.answer_s, *((t.t_end_ns - t.t_send_ns) / NS_PER_S for t in timings if t.ok)])

    def learn_burst(self, timings: Sequence[RequestTiming]) -> float | None:
        """From requests that were sent all at once: what was completed per second; None: nothing."""
        done = [t.t_end_ns for t in timings if t.ok]
        if not done:
            return None
        qps = len(done) * NS_PER_S / max(1, max(done) - min(t.t_send_ns for t in timings))
        self.bursts_qps.append(qps)
        return qps

    def told(self) -> dict[str, Any]:
        """What is stated of it."""
        c = self.contender
        return {
            "label": self.label,
            "name": c.name,
            "url": self.info.url,
            "model": self.info.model,
            "flags": list(c.flags),
            "setup": None if c.setup is None else plain(c.setup),
            "context_length": self.info.context_length,
            "idle_cpu": self.idle_cpu,
            "fresh_cache": self.fresh.way,
            "suspended": self.is_held,
            "burst_qps": self.burst_qps,
            "bursts_qps": list(self.bursts_qps),
        }


def salted(requests: Sequence[TimedRequest], salt: int) -> Sequence[TimedRequest]:
    """The same requests in other words; salt 0 leaves them as they are."""
    if not salt:
        return requests
    return [
        replace(r, segments=tuple(replace(s, key=seed_of(s.key, "again", salt)) for s in r.segments)) for r in requests
    ]

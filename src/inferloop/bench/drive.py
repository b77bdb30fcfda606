"""Load on one URL: a plan is shared out among sender processes, and what they tell is collected here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace

from inferloop.backends.endpoint import Endpoint
from inferloop.bench.client.garbage import quiet_collector
from inferloop.bench.client.head import new_base
from inferloop.bench.collector import Collector
from inferloop.bench.engine import Engine, EngineReport
from inferloop.bench.messages import Job
from inferloop.bench.plan import share_out, steps_of
from inferloop.bench.render import RenderedRequest
from inferloop.bench.senders import Sender, SenderDiedError, core_for
from inferloop.bench.share import Share, parts
from inferloop.bench.window import DriveOptions, DriveResult, OnDone, SenderStats, Stop, StopWhen
from inferloop.core.units import NS_PER_MS, NS_PER_S

__all__ = ["drive", "DriveOptions", "DriveResult", "Endpoint", "OnDone", "SenderStats", "Stop", "StopWhen"]

_LEAD_NS = 30 * NS_PER_MS
"""From the word to the start of the window: every sender has heard it by then."""
_LAST_WORDS_S = 2.0


async def drive(
    requests: Sequence[RenderedRequest],
    target: Endpoint,
    options: DriveOptions | None = None,
    *,
    on_done: OnDone | None = None,
    stop_when: StopWhen | None = None,
) -> DriveResult:
    """Send the requests when they are due, and wait for their answers.

    A request whose `after` is None is due `at_s` after the start of the window; one that follows another, `at_s` after
    that one's end. `on_done(position, timing)` is called soon after each ends, in the calling process and on its event
    loop; what it raises ends the window and is raised here. `stop_when(timings)`, asked after each, ends the window
    early. Cancelling the call censors every request in flight, tells of them, and raises. Raises UsageError for a plan
    that cannot be followed, or an endpoint that cannot be used.
    """
    options = options or DriveOptions()
    window = _Window(requests, target, options, on_done, stop_when)
    if options.num_senders == 0:
        return await window.here()
    with quiet_collector(off=False):
        return await window.elsewhere()


class _Window:
    def __init__(
        self,
        requests: Sequence[RenderedRequest],
        target: Endpoint,
        options: DriveOptions,
        on_done: OnDone | None,
        stop_when: StopWhen | None,
    ) -> None:
        self._target, self._options, self._id_base = target, options, new_base()
        self._requests = requests
        self._steps = steps_of([r.timed for r in requests])
        self._collector = Collector(
            requests,
            self._id_base,
            self._halt,
            on_done=on_done,
            stop_when=stop_when,
            keep_timings=options.keep_timings,
            redact=target.redact,
        )
        self._engine: Engine | None = None
        self._senders: list[Sender] = []

    async def here(self) -> DriveResult:
        """In this process, on this event loop."""
        share = Share()
        for part in parts(self._requests, self._steps, range(len(self._requests))):
            share.append(part)
        take = self._collector.take
        engine = self._engine = Engine(share, self._target, self._options, self._id_base, deliver=take)
        await engine.prepare()
        return self._collector.result([await engine.run(time.monotonic_ns())])

    async def elsewhere(self) -> DriveResult:
        """In processes of their own."""
        o = self._options
        shares = share_out(self._steps, o.num_senders)
        self._target.tls()  # a file that cannot be read is told before anything starts
        try:
            jobs = [self._job(number, len(share)) for number, share in enumerate(shares)]
            for _ in shares:
                sender = Sender(self._collector.take_all)
                await sender.start()
                self._senders.append(sender)
            hands = zip(self._senders, jobs, shares, strict=True)
            await asyncio.gather(*(s.hand(job, parts(self._requests, self._steps, share)) for s, job, share in hands))
            with contextlib.suppress(SenderDiedError):  # told below
                await asyncio.gather(*(sender.ready for sender in self._senders))
            start_ns = time.monotonic_ns() + _LEAD_NS
            for sender in self._senders:
                sender.begin(start_ns)
            reports = await self._reports(shares, start_ns)
        except asyncio.CancelledError:
            await self._last_words()
            raise
        finally:
            await asyncio.gather(*(sender.close() for sender in self._senders))
        return self._collector.result(reports)

    async def _reports(self, shares: Sequence[Sequence[int]], start_ns: int) -> list[EngineReport]:
        """Of all senders that live to tell. When one dies the window is over."""
        share_of = {sender.report: share for sender, share in zip(self._senders, shares, strict=True)}
        left = set(share_of)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                error = future.exception()
                if isinstance(error, SenderDiedError):
                    now_ns = time.monotonic_ns()
                    self._collector.lost(share_of[future], (now_ns - start_ns) / NS_PER_S, now_ns, str(error))
                    self._halt("cut")
                elif error is not None:
                    raise error
        return [future.result() for future in share_of if future.exception() is None]

    async def _last_words(self) -> None:
        """What is in flight is censored and told of, if that takes no time."""
        self._halt("cut")
        waiting = [sender.report for sender in self._senders if sender.begun]
        if waiting:
            await asyncio.wait(waiting, timeout=_LAST_WORDS_S)

    def _halt(self, how: Stop) -> None:
        if self._engine is not None:
            self._engine.stop(how)
        for sender in self._senders:
            sender.halt(how)

    def _job(self, number: int, num_requests: int) -> Job:
        o, target = self._options, self._target
        options = replace(
            o,
            num_senders=1,
            sender_cores=(),
            max_in_flight=None if o.max_in_flight is None else _part(o.max_in_flight, number, o.num_senders),
            max_connections=_part(o.max_connections, number, o.num_senders),
            num_connections=_part(o.num_connections, number, o.num_senders),
        )
        return Job(
            url=target.url,
            api_key=None if target.api_key is None else target.api_key.reveal(),
            ca_file=None if target.ca_file is None else str(target.ca_file),
            insecure=target.insecure,
            options=options,
            core=core_for(o.sender_cores, number),
            id_base=self._id_base.to_bytes(16, "big"),
            num_requests=num_requests,
        )


def _part(total: int, number: int, count: int) -> int:
    """Of `total` shared out among `count` as evenly as whole numbers allow."""
    return total // count + (number < total % count)

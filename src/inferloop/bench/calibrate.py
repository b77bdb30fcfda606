"""What this client reaches and adds on this host, against a server that does nothing. Told, never subtracted."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from inferloop.backends.endpoint import Endpoint
from inferloop.bench.drive import DriveOptions, drive
from inferloop.bench.render import RenderedRequest
from inferloop.core.errors import EnvironmentLacksError
from inferloop.core.request import Segment, TimedRequest
from inferloop.measure.quantiles import quantile
from inferloop.measure.summary import achieved_rate
from inferloop.measure.timing import schedule_delay_ms, ttft_ms

_NUM_TOKENS = 16
_PACED_QPS, _NUM_PACED = 200.0, 200
_NUM_USERS, _NUM_FLAT_OUT = 16, 1600


@dataclass(frozen=True, slots=True)
class Calibration:
    """`max_qps` streams of `num_tokens` tokens per second with one sender and one null server, both on this host.
    The others at `paced_qps` constant arrivals: what the client and the null server add to a TTFT, and how late sends
    are. None where too few came back."""

    max_qps: float | None
    num_tokens: int
    paced_qps: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    send_delay_p95_ms: float | None
    num_failed: int


async def calibrate() -> Calibration:
    """Takes about two seconds. Raises EnvironmentLacksError when the null server does not start."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "inferloop.bench.null_server", str(_NUM_TOKENS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C in the terminal is for us, who end it
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise EnvironmentLacksError("the null server that measures the load generator did not start")
        target = Endpoint(f"http://127.0.0.1:{int(line)}")
        paced = await drive([_request(i, i / _PACED_QPS) for i in range(_NUM_PACED)], target, _OPTIONS)
        flat = [_request(i, 0.0, None if i < _NUM_USERS else i - _NUM_USERS) for i in range(_NUM_FLAT_OUT)]
        reached = await drive(flat, target, _OPTIONS)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    waits = sorted(w for t in paced.timings if t.ok and (w := ttft_ms(t)) is not None)
    delays = sorted(d for t in paced.timings if (d := schedule_delay_ms(t)) is not None)
    return Calibration(
        max_qps=achieved_rate(reached.timings)[0],
        num_tokens=_NUM_TOKENS,
        paced_qps=_PACED_QPS,
        ttft_p50_ms=quantile(waits, 0.5) if waits else None,
        ttft_p95_ms=quantile(waits, 0.95) if waits else None,
        send_delay_p95_ms=quantile(delays, 0.95) if delays else None,
        num_failed=sum(not t.ok for t in [*paced.timings, *reached.timings]),
    )


_OPTIONS = DriveOptions(request_timeout_s=10.0, cut_off_s=5.0)


def _request(index: int, at_s: float, after: int | None = None) -> RenderedRequest:
    timed = TimedRequest(index, at_s, (Segment(index, 1),), _NUM_TOKENS, after=after)
    return RenderedRequest(timed, "/v1/chat/completions", b'{"stream":true}', 1, 0, False)

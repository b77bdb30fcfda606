"""How many short streams per second the load generator can offer: a null server in a process of its own.

python lab/client_ceiling.py --rates 1000 3000 6000 --seconds 4
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import cast

import uvloop

from inferloop.bench.drive import DriveOptions, Endpoint, drive
from inferloop.bench.render import RenderedRequest
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.units import NS_PER_S
from inferloop.measure.quantiles import quantile
from inferloop.measure.samples import collect
from inferloop.measure.timing import schedule_delay_ms

_FRAME = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"inferloop":{"num_tokens":1}}\n\n'
_LAST = b'data: {"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":4}}\n\ndata: [DONE]\n\n'
_BODY = 4 * _FRAME + _LAST
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(_BODY)


class Null(asyncio.Protocol):
    """Answers every request at once with the same four frames."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._buffer = cast(asyncio.Transport, transport), b""  # uvloop's has no common base

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = int(self._buffer[:end].lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._transport.write(_HEAD + _BODY)


def serve(pipe: Connection) -> None:
    """Until the other end of the pipe is closed, if only because its process was killed."""

    async def main() -> None:
        loop, closed = asyncio.get_running_loop(), asyncio.Event()
        listener = await loop.create_server(Null, "127.0.0.1", 0)
        loop.add_reader(pipe.fileno(), closed.set)
        pipe.send(listener.sockets[0].getsockname()[1])
        await closed.wait()

    uvloop.run(main())


async def measure(port: int, rates: list[float], seconds: float) -> None:
    target = Endpoint(f"http://127.0.0.1:{port}")
    print(f"load average {os.getloadavg()[0]:.1f}")
    print("asked/s    sent/s  failed  forgone  send delay p50 / p99 ms   TTFT p50 / p99 ms")
    for rate in rates:
        plan = [
            RenderedRequest(
                TimedRequest(i, i / rate, (Segment(i, 20),), 4), "/v1/chat/completions", b"x" * 400, 20, 0, False
            )
            for i in range(round(rate * seconds))
        ]
        result = await drive(plan, target, DriveOptions(cut_off_s=5.0))
        sends = sorted(t.t_send_ns for t in result.timings)
        sent = (len(sends) - 1) * NS_PER_S / (sends[-1] - sends[0])
        delays = sorted(d for t in result.timings if (d := schedule_delay_ms(t)) is not None)
        ttft = collect("ttft_ms", result.timings).adjusted()
        failed = sum(not t.ok for t in result.timings)
        print(
            f"{rate:7.0f} {sent:9.1f} {failed:7} {result.num_forgone:8}"
            f"  {quantile(delays, 0.5):12.2f} / {quantile(delays, 0.99):.2f}"
            f"  {quantile(ttft, 0.5):13.2f} / {quantile(ttft, 0.99):.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[1000.0, 3000.0, 6000.0])
    parser.add_argument("--seconds", type=float, default=4.0)
    asked = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        uvloop.run(measure(ours.recv(), asked.rates, asked.seconds))
    finally:
        server.kill()
        server.join()


if __name__ == "__main__":
    main()

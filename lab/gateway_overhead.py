"""What the gateway costs: the same requests to one scripted replica, directly and through the gateway, alternating.

    python lab/gateway_overhead.py [--pairs 300] [--rounds 3] [--seconds 3]

The gateway runs in a process of its own on uvloop, with nothing else in it. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import uvloop

from inferloop.backends.http import HttpClient
from inferloop.backends.protocols import LaunchSpec
from inferloop.backends.serve_process import launch_spec
from inferloop.fleet.act.process import ReplicaProcess
from inferloop.fleet.act.supervise import Fleet, FleetConfig

CHAT = "/v1/chat/completions"
NUM_TOKENS = 64


async def run_fleet(port: int) -> None:
    """The process under test."""
    script = ["ttft_ms=5", "tpot_ms=1", "max_concurrency=256"]
    spec = launch_spec("demo", {"script": script}, backend="scripted")
    async with Fleet(spec, FleetConfig(Path(tempfile.mkdtemp()), port=port)) as fleet:
        await fleet.start(1)
        print(json.dumps({"replica": fleet.status().replicas[0].url}), flush=True)
        await asyncio.Event().wait()


async def stream(client: HttpClient, num_tokens: int) -> float:
    """TTFT in ms of one streamed chat, read to its end."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": num_tokens}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    t_ns, first_ns = time.monotonic_ns(), None
    response = await client.request("POST", CHAT, body=data, headers=[("content-type", "application/json")])
    assert response.status == 200, await response.read()
    async for t_piece_ns, _ in response.pieces():
        first_ns = first_ns or t_piece_ns
    assert first_ns is not None
    return (first_ns - t_ns) / 1e6


async def closed_loop(client: HttpClient, num_workers: int, seconds: float) -> float:
    """Streams per second."""
    num_done, end_s = 0, time.monotonic() + seconds

    async def work() -> None:
        nonlocal num_done
        while time.monotonic() < end_s:
            await stream(client, NUM_TOKENS)
            num_done += 1

    begin_s = time.monotonic()
    await asyncio.gather(*(work() for _ in range(num_workers)))
    return num_done / (time.monotonic() - begin_s)


async def measure(num_pairs: int, num_rounds: int, seconds: float) -> dict[str, object]:
    log = Path(tempfile.mkdtemp()) / "fleet.log"
    spec = LaunchSpec("lab", (sys.executable, __file__, "--fleet", "{port}"), "demo")
    process = await ReplicaProcess.start_ready(spec, log_path=log)
    try:
        replica_url = json.loads(log.read_text().splitlines()[-1])["replica"]
        direct, gateway = HttpClient(replica_url), HttpClient(process.url)
        gateway_process = psutil.Process(process.pid)
        for client in (direct, gateway):
            await closed_loop(client, 8, 0.5)
        pairs = [(await stream(direct, 4), await stream(gateway, 4)) for _ in range(num_pairs)]
        added = sorted(b - a for a, b in pairs)
        rates: dict[str, list[float]] = {"direct": [], "gateway": []}
        cpu_s = num_streams = 0.0
        for _ in range(num_rounds):
            rates["direct"].append(await closed_loop(direct, 32, seconds))
            before = sum(gateway_process.cpu_times()[:2])
            begin_s = time.monotonic()
            rates["gateway"].append(await closed_loop(gateway, 32, seconds))
            num_streams += rates["gateway"][-1] * (time.monotonic() - begin_s)
            cpu_s += sum(gateway_process.cpu_times()[:2]) - before
        await direct.close()
        await gateway.close()
    finally:
        await process.stop(10)
    return {
        "ttft_ms": {
            "direct_p50": statistics.median(a for a, _ in pairs),
            "gateway_p50": statistics.median(b for _, b in pairs),
        },
        "added_ttft_ms": {
            "p10": added[num_pairs // 10],
            "p50": added[num_pairs // 2],
            "p90": added[num_pairs * 9 // 10],
        },
        "streams_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "gateway_cpu_s_per_1k_streams": 1000 * cpu_s / num_streams,
        "gateway_cpu_s_per_m_tokens": 1e6 * cpu_s / (num_streams * NUM_TOKENS),
        "load_average": psutil.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if args.fleet is not None:
            runner.run(run_fleet(args.fleet))
        else:
            print(json.dumps(runner.run(measure(args.pairs, args.rounds, args.seconds)), indent=1))


if __name__ == "__main__":
    main()

"""What the prefix cache is worth: one workload with shared prefixes, with the cache on and off.

    python lab/prefix_reuse.py --requests 60 [--deterministic]

Two servers run beside each other, and only one is asked at a time: every request of a contract with 1,000-token prompts
and prefix_reuse 0.8 goes to the one, then to the other, in alternating order. Prints the TTFT percentiles of both,
their ratio and how many greedy texts are the same, and exits 1 when the ratio of the medians is below 3 or, in
deterministic mode, any text differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

from inferloop.backends.http import HttpClient
from inferloop.backends.serve_process import launch_spec
from inferloop.bench.codecs import HttpCodec
from inferloop.bench.render import RenderedRequest, RenderOptions, render
from inferloop.bench.stream import StreamReader
from inferloop.contract.load import parse
from inferloop.contract.sample import sample_workload
from inferloop.core.clock import RealClock
from inferloop.core.units import ns_to_ms
from inferloop.fleet.act.process import ReplicaProcess

MODEL = "smollm2-135m-instruct"
LEAST_RATIO = 3.0
CONTRACT = {
    "version": 1,
    "service": "prefix-reuse",
    "archetype": "chat",
    "model": {"id": MODEL},
    "traffic": {
        "qps": {"avg": 0.5, "peak": 1},
        "input_tokens": {"p50": 1000, "p95": 1000},
        "output_tokens": {"p50": 16, "p95": 16},
        "prefix_reuse": 0.8,
    },
    "slo": {"ttft_ms": {"p95": 2000}},
}


async def ask(client: HttpClient, request: RenderedRequest) -> tuple[float, str, int]:
    """(TTFT in ms, the text, cached prompt tokens) of one streamed answer."""
    clock, reader = RealClock(), StreamReader(keep_text=True)
    t_send_ns = clock.now_ns()
    headers = [("content-type", "application/json"), ("x-inferloop-timings", "1")]
    response = await client.request("POST", request.path, body=request.body, headers=headers)
    assert response.status == 200, await response.read()
    async for t_ns, piece in response.pieces():
        reader.feed(t_ns, piece)
    result = reader.finish()
    assert result.error is None and result.chunks, result
    return ns_to_ms(result.chunks[0].t_ns - t_send_ns), result.text, result.num_cached_tokens


async def measure(num_requests: int, deterministic: bool, threads: int, folder: Path) -> dict[str, object]:
    workload = sample_workload(parse(CONTRACT), seed=1, num_requests=num_requests)
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, HttpClient] = {}
        for name in ("on", "off"):
            options = {"deterministic": deterministic, "threads": threads, "no_enable_prefix_caching": name == "off"}
            spec = launch_spec(MODEL, options)
            process = await ReplicaProcess.start_ready(spec, log_path=folder / f"{name}.log", replica_id=name)
            stack.push_async_callback(process.stop, 5.0)
            clients[name] = HttpClient(process.url)
            stack.push_async_callback(clients[name].close)
        codec = await asyncio.to_thread(HttpCodec, process.url, MODEL)
        stack.callback(codec.close)
        requests = await asyncio.to_thread(render, workload.requests, codec, RenderOptions(model=MODEL))
        ttfts_ms: dict[str, list[float]] = {"on": [], "off": []}
        num_cached = num_same = 0
        for i, request in enumerate(requests):
            texts = {}
            for name in ("on", "off") if i % 2 else ("off", "on"):
                ttft_ms, texts[name], cached = await ask(clients[name], request)
                ttfts_ms[name].append(ttft_ms)
                num_cached += cached
            num_same += texts["on"] == texts["off"]
            if sys.stderr.isatty():
                print(f"\r{i + 1}/{len(requests)}", end="", file=sys.stderr)
    p50 = {name: statistics.median(values) for name, values in ttfts_ms.items()}
    return {
        "deterministic": deterministic,
        "num_requests": num_requests,
        "declared_reuse": round(workload.prefix_reuse, 3),
        "cached_share": round(num_cached / sum(r.num_input_tokens for r in requests), 3),
        "ttft_p50_ms": {name: round(value, 1) for name, value in p50.items()},
        "ttft_p95_ms": {n: round(statistics.quantiles(v, n=20)[-1], 1) for n, v in ttfts_ms.items()},
        "ratio_p50": round(p50["off"] / p50["on"], 2),
        "same_texts": num_same,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(args.requests, args.deterministic, args.threads, Path(folder)))
    print(json.dumps(found))
    wrong = args.deterministic and found["same_texts"] != args.requests
    return 1 if wrong or float(str(found["ratio_p50"])) < LEAST_RATIO else 0


if __name__ == "__main__":
    sys.exit(main())

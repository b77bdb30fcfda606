"""What holding an answer back until it is checked costs a stream, and what an escalation costs: times and dollars.

    python -m lab.routing --rounds 10
    python -m lab.routing --strong gemma3-270m --path completions --rounds 10

Two models run behind one gateway, cheap at one price, strong at ten times that. The same prompts are streamed in turns,
one at a time: `pinned` names a model, so nothing is held; `held` is routed and its answer passes its check; `escalated`
is routed, its answer fails (it is not the JSON that the rule expects), and the strong model's is streamed. Every number
is the median over the prompts of all rounds. The texts are asked for once before anything is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from inferloop.backends.http import HttpClient
from inferloop.backends.serve_process import launch_spec
from inferloop.contract.load import parse
from inferloop.core.units import ns_to_ms
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.supervise import Fleet, FleetConfig
from inferloop.records.event import GatewayEvent
from inferloop.records.sink import JsonlSink

PROMPTS = ("The capital of France is", "Water boils at", "Name three colours.", "Once upon a time")
VARIANTS = (
    ("pinned cheap", "cheap", ""),
    ("held", "desk", ""),
    ("escalated", "desk", "extract"),
    ("pinned strong", "strong", ""),
)
_NEVER = -1000.0
"""A log-probability below which no answer is: the check looks at every answer and fails none."""


async def measure(options: argparse.Namespace, folder: Path) -> None:
    contract = parse(
        {
            "service": "desk",
            "traffic": {"qps": 1, "input_tokens": {"p50": 30}, "output_tokens": {"p50": 8}},
            "models": {
                "cheap": {"id": options.cheap, "usd_per_mtok": 1},
                "strong": {"id": options.strong, "usd_per_mtok": 10},
            },
            "routing": {
                "default": "cheap",
                "rules": [{"class": "extract", "model": "cheap", "expect": "json"}],
                "escalation": {"from": "cheap", "to": "strong", "on": ["invalid_json", {"low_logprob": _NEVER}]},
            },
        }
    )
    assert contract.routing is not None
    specs = {}
    for name, model, dtype in (
        ("cheap", options.cheap, options.cheap_dtype),
        ("strong", options.strong, options.strong_dtype),
    ):
        flags = {"served_model_name": name, "dtype": dtype, "kv_memory_mib": 128, "context_length": 2048}
        specs[name] = launch_spec(model, {**flags, "replica": "{replica}"}, ready_timeout_s=300)
    config = FleetConfig(folder / "logs", gateway=GatewayConfig(service="desk", routing=contract.routing))
    sink = JsonlSink(folder / "gateway.jsonl")
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    async with Fleet(specs, config, sink=sink) as fleet:
        await fleet.start(dict.fromkeys(specs, 1))
        client = HttpClient(fleet.url)
        for number in range(options.rounds + 1):
            for prompt in PROMPTS:
                for variant, model, traffic_class in VARIANTS:
                    taken = await _stream(client, options, prompt, model, traffic_class)
                    if number:
                        times[variant].append(taken)
        await client.close()
    sink.close()
    rows = [
        msgspec.json.decode(line, type=GatewayEvent) for line in (folder / "gateway.jsonl").read_bytes().splitlines()
    ]
    print(f"{'':14} {'TTFT ms':>8} {'TTLT ms':>8} {'models asked':>13} {'USD per 1000':>13}")
    for i, (variant, *_) in enumerate(VARIANTS):
        ttft_ms, ttlt_ms = (statistics.median(values) for values in zip(*times[variant], strict=True))
        mine = rows[i :: len(VARIANTS)][len(PROMPTS) :]
        hops = statistics.mean(len(row.hops) for row in mine)
        usd = statistics.mean(row.cost_usd or 0.0 for row in mine) * 1000
        print(f"{variant:14} {ttft_ms:8.1f} {ttlt_ms:8.1f} {hops:13.2f} {usd:13.4f}")


async def _stream(
    client: HttpClient, options: argparse.Namespace, prompt: str, model: str, traffic_class: str
) -> tuple[float, float]:
    """Milliseconds to the first token and to the end."""
    body: dict[str, Any] = {"model": model, "max_tokens": options.max_tokens, "temperature": 0, "stream": True}
    body |= {"prompt": prompt} if options.path == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    path = "/v1/completions" if options.path == "completions" else "/v1/chat/completions"
    headers = [("x-inferloop-class", traffic_class)] if traffic_class else []
    t_sent = time.monotonic_ns()
    response = await client.request("POST", path, body=msgspec.json.encode(body), headers=headers, timeout_s=120)
    stamps = [t_ns async for t_ns, _ in response.pieces()]
    if response.status != 200:
        raise SystemExit(f"HTTP {response.status} for {model}")
    return ns_to_ms(stamps[0] - t_sent), ns_to_ms(stamps[-1] - t_sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cheap", default="smollm2-135m-instruct")
    parser.add_argument("--cheap-dtype", default="int8")
    parser.add_argument("--strong", default="smollm2-135m-instruct")
    parser.add_argument("--strong-dtype", default="bf16")
    parser.add_argument("--path", choices=["chat", "completions"], default="chat")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()

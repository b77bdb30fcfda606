"""The replica under test: a process with a tiny KV pool, and what can be read of it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from inferloop.backends.http import HttpClient
from inferloop.backends.serve_process import Value, launch_spec
from inferloop.core.units import MIB
from inferloop.fleet.act.process import ReplicaProcess

MODEL = "smollm2-135m-instruct"
OPTIONS: dict[str, Value] = {
    "deterministic": True,
    "kv_memory_mib": 16,  # some 350 tokens: what runs together does not fit for long
    "context_length": 2048,
    "max_num_seqs": 8,
    "max_num_waiting": 18,
    "max_num_batched_tokens": 96,
    "enable_prefix_caching": True,
    "prefix_cache_disk_mib": 64,  # what gives way comes back from disk, where there is not room for everything either
    "prefix_cache_memory_mib": 8,
    "threads": 1,
}


@dataclass(frozen=True, slots=True)
class Sample:
    t_s: float
    rss_mib: float


@contextlib.asynccontextmanager
async def running(folder: Path, options: dict[str, Value]) -> AsyncIterator[ReplicaProcess]:
    files: dict[str, Value] = {
        "events": str(folder / "events.jsonl"),
        "prefix_cache_dir": str(folder / "prefix-cache"),
        "batch_dir": str(folder / "batches"),
    }
    spec = launch_spec(MODEL, {**options, **files}, drain_timeout_s=20)
    process = await ReplicaProcess.start_ready(spec, log_path=folder / "server.log")
    try:
        yield process
    finally:
        await process.stop()


async def sample_memory(process: ReplicaProcess, samples: list[Sample], *, every_s: float = 1.0) -> None:
    """Append to `samples` until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        samples.append(Sample(loop.time(), process.memory_bytes() / MIB))
        await asyncio.sleep(every_s)


async def counters(http: HttpClient) -> dict[str, float]:
    """Every inferloop_* value by its name, with the labels other than the model's; histograms left out."""
    text = (await (await http.request("GET", "/metrics", timeout_s=30)).read()).decode()
    found = {}
    for name, labels, value in re.findall(r"^(inferloop_\w+?)(?:_total)?(\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        if not name.endswith(("_bucket", "_sum", "_count", "_created")):
            rest = re.sub(r'(?:model_name|identity)="[^"]*",?|[{}"]|,$', "", labels).strip(",")
            found[f"{name}{f' {rest}' if rest else ''}"] = float(value)
    return found


async def idle(http: HttpClient, *, within_s: float = 30.0) -> dict[str, float]:
    """The gauges of work once they are all zero, or as they are after `within_s`."""
    for _ in range(int(within_s / 0.1)):
        progress = await http.get_json("/health/progress", timeout_s=30)
        now = await counters(http)
        left = {
            "running": float(progress["running"]),
            "waiting": float(progress["waiting"]),
            "in flight": float(progress["in_flight"]),
            "KV in use": now["inferloop_kv_usage_ratio"],
        }
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return left

"""AIPerf. How long a request waited after its credit is all it tells of lateness: a credit may be late itself."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lab.load_generators.load import NUM_TOKENS, Command, Printed, Task, Told, peer

_PRINTED = {
    "TTFT": "time_to_first_token",
    "TTST": "time_to_second_token",
    "TTFO": "time_to_first_output_token",
    "request latency": "request_latency",
    "ITL": "inter_token_latency",
    "ICL": "inter_chunk_latency",
}
"""Its names by those of measure.compat."""


class AiPerf:
    name = "aiperf"
    compat = "aiperf"
    rates: Mapping[str, float] = {"plain": 520, "whole": 280, "fast": 280, "paced": 450}

    def command(self, task: Task) -> Command:
        load = task.load
        argv = [peer("aiperf", "aiperf"), "profile", "--model", "lab", "--url", task.base_url]
        argv += ["--endpoint-type", "chat", *(["--streaming"] if load.is_streamed else [])]
        argv += ["--tokenizer", task.tokenizer, "--use-server-token-count", "--isl", "20", "--osl", str(NUM_TOKENS)]
        argv += ["--request-count", str(task.count), "--num-prompts", "100", "--random-seed", str(task.seed)]
        if load.rate:
            argv += ["--request-rate", str(load.rate), "--arrival-pattern", "poisson"]
        else:
            argv += ["--concurrency", str(load.users)]
        argv += ["--workers-max", "1", "--record-processors", "1", "--ui", "none"]
        argv += ["--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(task.folder)]
        return Command(argv)

    def told(self, task: Task) -> Told:
        row = json.loads((task.folder / "profile_export_aiperf.json").read_text())
        ttft = row.get("time_to_first_token", {})
        late = row["credit_to_start_latency"]["p99"] if task.load.rate else None
        return Told(ttft.get("p50"), ttft.get("p99"), late)

    def printed(self, task: Task) -> Printed:
        row = json.loads((task.folder / "profile_export_aiperf.json").read_text())
        return {n: {"mean": row[k]["avg"], "p50": row[k]["p50"], "p99": row[k]["p99"]} for n, k in _PRINTED.items()}

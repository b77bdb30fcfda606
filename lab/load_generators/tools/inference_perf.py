"""inference-perf, with one worker process for its one core."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lab.load_generators.load import Command, Printed, Task, Told, peer

_PRINTED = {
    "TTFT": "time_to_first_token",
    "TPOT": "time_per_output_token",
    "ITL": "inter_token_latency",
    "NTPOT": "normalized_time_per_output_token",
    "request latency": "request_latency",
}
"""Its names by those of measure.compat."""


class InferencePerf:
    name = "inference-perf"
    compat = "inference-perf"
    rates: Mapping[str, float] = {"plain": 1_400, "whole": 700, "fast": 700, "paced": 650}

    def command(self, task: Task) -> Command:
        load = task.load
        stages: list[dict[str, Any]] = [{"num_requests": task.count, "concurrency_level": load.users}]
        if load.rate:
            stages = [{"rate": load.rate, "duration": round(task.count / load.rate)}]
        config = {
            "api": {"type": "chat", "streaming": load.is_streamed},
            "data": {"type": "mock"},
            "load": {
                "type": "poisson" if load.rate else "concurrent",
                "num_workers": 1,
                "worker_max_concurrency": max(load.users, 256),
                "stages": stages,
            },
            "server": {"type": "vllm", "model_name": "lab", "base_url": task.base_url, "ignore_eos": False},
            "tokenizer": {"pretrained_model_name_or_path": task.tokenizer},
            "storage": {"local_storage": {"path": str(task.folder / "out")}},
            "report": {"request_lifecycle": {"percentiles": [50, 90, 95, 99], "use_server_output_tokens": True}},
        }
        path = task.folder / "config.yml"
        path.write_text(json.dumps(config))  # which YAML is a superset of
        return Command([peer("inference-perf", "inference-perf"), "--config_file", str(path)])

    def told(self, task: Task) -> Told:
        row = json.loads((task.folder / "out" / "summary_lifecycle_metrics.json").read_text())
        ttft = row["successes"]["latency"].get("time_to_first_token") or {}
        late = row["load_summary"]["schedule_delay"]["p99"] if task.load.rate else None
        in_ms = {key: None if value is None else 1e3 * value for key, value in ttft.items()}
        return Told(in_ms.get("median", in_ms.get("p50")), in_ms.get("p99"), None if late is None else 1e3 * late)

    def printed(self, task: Task) -> Printed:
        row = json.loads((task.folder / "out" / "summary_lifecycle_metrics.json").read_text())
        found = row["successes"]["latency"]
        stats = {"mean": "mean", "p50": "median", "p99": "p99"}
        return {n: {key: 1e3 * found[k][stat] for key, stat in stats.items()} for n, k in _PRINTED.items()}

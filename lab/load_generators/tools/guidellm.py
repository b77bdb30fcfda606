"""GuideLLM, with one worker process for its one core."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from lab.load_generators.load import NUM_TOKENS, Command, Printed, Task, Told, peer

_PRINTED = {
    "TTFT": ("time_to_first_token_ms", 1.0),
    "TTFOT": ("time_to_first_output_token_ms", 1.0),
    "ITL": ("inter_token_latency_ms", 1.0),
    "TPOT": ("time_per_output_token_ms", 1.0),
    "request latency": ("request_latency", 1e3),
}
"""(its name, to ms) by those of measure.compat."""


class GuideLlm:
    name = "guidellm"
    compat = "guidellm"
    rates: Mapping[str, float] = {"plain": 260, "whole": 230, "fast": 230, "paced": 160}

    def command(self, task: Task) -> Command:
        load = task.load
        backend = {"kind": "openai_http", "target": task.base_url, "model": "lab", "max_tokens": NUM_TOKENS}
        profile = {"kind": "concurrent", "streams": load.users}
        if load.rate:
            profile = {"kind": "poisson", "rate": load.rate}
        spec = {
            "backend": backend | {"stream": load.is_streamed},
            "profile": profile,
            "constraints": [{"kind": "max_requests", "count": task.count}],
            "tokenizer": {"kind": "huggingface_auto", "model": task.tokenizer},
            "data": [{"kind": "synthetic_text", "prompt_tokens": 20, "output_tokens": NUM_TOKENS}],
            "seed": {"kind": "static", "value": task.seed},
            "outputs": [{"kind": "json", "path": str(task.folder / "result.json")}],
            "metrics": {"kind": "generative", "sample_size": 0},
        }
        path = task.folder / "config.json"
        path.write_text(json.dumps({"spec": spec}))
        argv = [peer("guidellm", "guidellm"), "run", "--config", str(path), "--disable-console"]
        return Command(argv, {"GUIDELLM__MAX_WORKER_PROCESSES": "1"})

    def told(self, task: Task) -> Told:
        (row,) = json.loads((task.folder / "result.json").read_text())["benchmarks"]
        ttft = row["metrics"]["time_to_first_token_ms"]["successful"]["percentiles"]
        late = None
        if task.load.rate:
            times = [r["info"]["timings"] for r in row["requests"]["successful"]]
            late = float(np.percentile([1e3 * (t["request_start"] - t["targeted_start"]) for t in times], 99))
        return Told(ttft["p50"], ttft["p99"], late)

    def printed(self, task: Task) -> Printed:
        (row,) = json.loads((task.folder / "result.json").read_text())["benchmarks"]
        found: Printed = {}
        for name, (key, factor) in _PRINTED.items():
            stats = row["metrics"][key]["successful"]
            told = {"mean": stats["mean"], "p50": stats["percentiles"]["p50"], "p99": stats["percentiles"]["p99"]}
            found[name] = {stat: factor * value for stat, value in told.items()}
        return found

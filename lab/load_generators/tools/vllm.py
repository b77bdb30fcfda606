"""vllm bench serve: its module, as its command asks for a distribution that the CPU build of vLLM is not."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lab.load_generators.load import NUM_TOKENS, Command, Printed, Task, Told, peer

_MAIN = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class VllmBench:
    name = "vllm bench serve"
    compat = "vllm"
    rates: Mapping[str, float] = {"whole": 1_700, "fast": 1_600, "paced": 1_000}

    def command(self, task: Task) -> Command:
        load = task.load
        argv = [peer("vllm"), "-c", _MAIN, "--backend", "openai-chat", "--base-url", task.base_url]
        argv += ["--endpoint", "/v1/chat/completions", "--model", "lab", "--tokenizer", task.tokenizer]
        argv += ["--dataset-name", "random", "--random-input-len", "20", "--random-output-len", str(NUM_TOKENS)]
        argv += ["--num-prompts", str(task.count), "--seed", str(task.seed), "--disable-tqdm"]
        argv += ["--request-rate", str(load.rate)] if load.rate else ["--max-concurrency", str(load.users)]
        argv += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99"]
        argv += ["--save-result", "--result-dir", str(task.folder), "--result-filename", "result.json"]
        return Command(argv)

    def told(self, task: Task) -> Told:
        row = json.loads((task.folder / "result.json").read_text())
        return Told(row["p50_ttft_ms"], row["p99_ttft_ms"])

    def printed(self, task: Task) -> Printed:
        row = json.loads((task.folder / "result.json").read_text())
        stats = {"mean": "mean", "p50": "median", "p99": "p99"}
        names = ("TTFT", "TPOT", "ITL", "E2EL")
        return {n: {key: row[f"{stat}_{n.lower()}_ms"] for key, stat in stats.items()} for n in names}

"""Load generators beside each other, in turns: each on one core, a server that costs next to nothing on the other.

    make peers                                                  once: installs the others below .peers/
    python -m lab.load_generators.run --rounds 1                appends a round to .peers/results/load-generators.jsonl
    python -m lab.load_generators.run --loads fast --rounds 1   one load of it
    python -m lab.load_generators.run --report                  the medians of all that was measured

The server counts: rates are its answers per second between the tenth and the ninetieth percent of them, so that neither
the start of a tool nor its end counts. It also knows when requests arrived, and how long it let each wait for its first
token. TTFT and lateness are what the tools report, beside the server's truth. Windows are about --seconds long.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from lab.load_generators.load import LOADS, NUM_TOKENS, Load, Task, Tool
from lab.load_generators.tokenizer import NAME, write_tokenizer
from lab.load_generators.tools.aiperf import AiPerf
from lab.load_generators.tools.guidellm import GuideLlm
from lab.load_generators.tools.inference_perf import InferencePerf
from lab.load_generators.tools.ours import Inferloop
from lab.load_generators.tools.vllm import VllmBench
from lab.load_generators.usage import Watch
from lab.null_server import NullServer, null_server
from lab.peers.models import SMOLLM2
from numpy.typing import NDArray

from inferloop.models.resolve import resolve

TOOLS: dict[str, Tool] = {tool.name: tool for tool in (Inferloop(), VllmBench(), InferencePerf(), AiPerf(), GuideLlm())}
RESULTS = Path(".peers/results/load-generators.jsonl")
HF_HOME = Path(".peers/hf")
TIMEOUT_S = 120.0

Row = dict[str, Any]


def count_of(tool: Tool, load: Load, seconds: float) -> int:
    """Requests of a window: a closed loop begins and ends with fewer than its users in flight."""
    return round(load.rate * seconds) if load.rate else round(tool.rates[load.name] * seconds) + load.users


def measure(tool: Tool, load: Load, server: NullServer, cores: tuple[int, int], seconds: float, seed: int) -> Row:
    """One window. Raises RuntimeError with what the tool wrote when it fails."""
    with tempfile.TemporaryDirectory(prefix="inferloop-lab-") as folder:
        task = Task(load, server.url, count_of(tool, load, seconds), seed, Path(folder), NAME)
        command = tool.command(task)
        env = os.environ | {"HF_HOME": str(HF_HOME.absolute()), "HF_HUB_OFFLINE": "1", **command.env}
        server.rows()
        with (Path(folder) / "output.txt").open("w+") as output:
            argv = ["taskset", "-c", str(cores[0]), *command.argv]
            cwd = None if tool.name == Inferloop.name else folder
            process = subprocess.Popen(argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            with process, Watch(process.pid, server, cores[1]) as watch:
                try:
                    code = process.wait(TIMEOUT_S)
                finally:
                    process.kill()
            rows = server.rows()
            if code:
                output.seek(0)
                raise RuntimeError(f"{tool.name}, {load.name}: code {code}\n{output.read()[-3000:]}")
        return row_of(task, tool, rows, watch)


def row_of(task: Task, tool: Tool, rows: NDArray[np.uint64], watch: Watch) -> Row:
    """What the tool and the server's rows tell of one window."""
    told = tool.told(task)
    whole, end = (np.sort(rows[:, i].astype(np.int64)) for i in (0, 2))
    waited_ms = (rows[:, 1].astype(np.int64) - rows[:, 0].astype(np.int64)) / 1e6
    tenth, ninetieth = int(end[len(end) // 10]), int(end[len(end) * 9 // 10])
    per_s = (len(end) * 9 // 10 - len(end) // 10) / (ninetieth - tenth) * 1e9
    tool_share, server_share = watch.shares(tenth, ninetieth)
    row = {
        "tool": tool.name,
        "load": task.load.name,
        "num": len(rows),
        "num_unanswered": int((rows[:, 2] == 0).sum()),
        "per_s": per_s,
        "cpu_ms_each": tool_share / per_s * 1e3,
        "tool_share": tool_share,
        "server_share": server_share,
        "rss_mb": watch.peak_rss_bytes / 1e6,
        "ttft_p50": told.ttft_p50,
        "ttft_p99": told.ttft_p99,
        "true_p50": float(np.percentile(waited_ms, 50)),
        "true_p99": float(np.percentile(waited_ms, 99)),
        "late_p99": told.late_p99,
        "sent_per_s": (len(whole) - 1) / (int(whole[-1]) - int(whole[0])) * 1e9,
    }
    if len(told.intended_ns) == len(whole):
        row["arrived_late_p99"] = float(np.percentile((whole - np.array(told.intended_ns)) / 1e6, 99))
    return row


def median(rows: list[Row], key: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    if not values:
        return "-"
    value = statistics.median(values)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def report(rows: list[Row]) -> str:
    """Two Markdown tables, of closed and of open loops."""
    lines = ["| load | tool | per second | tokens/s | CPU, ms each | tool | server | RSS, MB | n |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for load in (load for load in LOADS.values() if load.rate is None):
        for tool in TOOLS:
            found = [r for r in rows if r["tool"] == tool and r["load"] == load.name]
            if found:
                tokens = f"{statistics.median(r['per_s'] for r in found) * NUM_TOKENS:,.0f}" if load.is_streamed else ""
                shown = [median(found, key) for key in ("per_s", "cpu_ms_each", "tool_share", "server_share", "rss_mb")]
                lines.append(f"| {load.name} | {tool} | {' | '.join([shown[0], tokens, *shown[1:]])} | {len(found)} |")
    lines += ["", "| Poisson | tool | sent per second | TTFT p50 / p99 | the server's | late p99 | as the server saw |"]
    lines[-1] += " tool | RSS, MB | n |"
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for load in (load for load in LOADS.values() if load.rate is not None):
        for tool in TOOLS:
            found = [r for r in rows if r["tool"] == tool and r["load"] == load.name]
            if found:
                keys = ("ttft_p50", "ttft_p99", "true_p50", "true_p99", "late_p99", "arrived_late_p99", "tool_share")
                a, b, c, d, *rest = (median(found, key) for key in (*keys, "rss_mb"))
                shown = [median(found, "sent_per_s"), f"{a} / {b}", f"{c} / {d}", *rest]
                lines.append(f"| {load.name} | {tool} | {' | '.join(shown)} | {len(found)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    if not asked.report:
        ours, theirs = sorted(os.sched_getaffinity(0))[:2]
        write_tokenizer(resolve(SMOLLM2).path, HF_HOME)
        os.sched_setaffinity(0, {theirs})
        with null_server(theirs) as server, RESULTS.open("a") as results:
            for i in range(asked.rounds):
                for load in map(LOADS.__getitem__, asked.loads):
                    for tool in map(TOOLS.__getitem__, asked.tools):
                        if load.rate is None and load.name not in tool.rates:
                            continue
                        try:
                            row = measure(tool, load, server, (ours, theirs), asked.seconds, asked.seed + i)
                        except RuntimeError as error:
                            print(error, file=sys.stderr)
                            continue
                        print(json.dumps(row), file=sys.stderr)
                        results.write(json.dumps(row) + "\n")
                        results.flush()
    print(report([json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []))


if __name__ == "__main__":
    main()

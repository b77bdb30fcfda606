"""Load generators beside each other, in turns: each on one core, a server that costs next to nothing on the other.

    make peers                                                  once: installs the others below .peers/
    python -m lab.load_generators.run --rounds 3                prints the medians, and each goal beside what was found
    python -m lab.load_generators.run --loads fast --rounds 1   one load of it
    python -m lab.load_generators.run --report                  of all that was ever measured

Rows are appended to .peers/results/load-generators.jsonl. INFERLOOP_PEERS names another folder than .peers, such as
that of another working copy. Streams are measured with all tools in each round, other loads only with ours after the
first.

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
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
from lab.load_generators.goals import STREAMS, goals
from lab.load_generators.load import LOADS, NUM_TOKENS, Load, Task, Tool, peers
from lab.load_generators.tokenizer import NAME, write_tokenizer
from lab.load_generators.tools.aiperf import AiPerf
from lab.load_generators.tools.counter import Counter
from lab.load_generators.tools.guidellm import GuideLlm
from lab.load_generators.tools.inference_perf import InferencePerf
from lab.load_generators.tools.ours import Inferloop
from lab.load_generators.tools.vllm import VllmBench
from lab.load_generators.usage import Watch
from lab.null_server import NullServer, null_server
from lab.peers.models import SMOLLM2
from numpy.typing import NDArray

from inferloop.models.resolve import resolve

_ALL: tuple[Tool, ...] = (Inferloop(), Counter(), VllmBench(), InferencePerf(), AiPerf(), GuideLlm())
TOOLS = {tool.name: tool for tool in _ALL}
DEFAULT_LOADS = ("plain", "whole", "fast", "paced", "200/s")
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
        env = os.environ | {"HF_HOME": str(peers() / "hf"), "HF_HUB_OFFLINE": "1", **command.env}
        server.rows()
        begun_s = time.monotonic()
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
        return row_of(task, tool, rows, watch) | {"elapsed_s": time.monotonic() - begun_s}


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


def is_wanted(tool: Tool, load: Load, number: int) -> bool:
    """Whether a tool is measured on a load in the round `number`, from 0."""
    if (load.rate is None and load.name not in tool.rates) or (load.rate is not None and isinstance(tool, Counter)):
        return False
    return number == 0 or isinstance(tool, Inferloop) or load.name in STREAMS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(DEFAULT_LOADS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    path = peers() / "results" / "load-generators.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if asked.report:
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    else:
        with path.open("a") as results:
            rows = play(asked, results)
    print(report(rows), goals(rows), sep="\n\n")


def play(asked: argparse.Namespace, results: IO[str]) -> list[Row]:
    """All rounds; each row is written as soon as it is there. A window that fails is told and left out."""
    ours, theirs = sorted(os.sched_getaffinity(0))[:2]
    tools = [TOOLS[name] for name in asked.tools]
    rows: list[Row] = []
    if any(not isinstance(tool, Inferloop | Counter) for tool in tools):
        write_tokenizer(resolve(SMOLLM2).path, peers() / "hf")
    os.sched_setaffinity(0, {theirs})
    with null_server(theirs) as server:
        for i in range(asked.rounds):
            for load in map(LOADS.__getitem__, asked.loads):
                for tool in tools:
                    if not is_wanted(tool, load, i):
                        continue
                    try:
                        row = measure(tool, load, server, (ours, theirs), asked.seconds, asked.seed + i)
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        print(error, file=sys.stderr)
                        continue
                    print(json.dumps(row), file=sys.stderr)
                    results.write(json.dumps(row) + "\n")
                    results.flush()
                    rows.append(row)
    return rows


if __name__ == "__main__":
    main()

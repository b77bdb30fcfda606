"""This project's load generator as a program of its own: python -m lab.load_generators.own TASK.json.

The sender and the process that makes records share the core that both were given. Records are kept as in a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.load_generator import closed, poisson, requests
from lab.load_generators.load import Task
from lab.load_generators.tools.ours import task_of

from inferloop.bench.drive import DriveOptions, Endpoint, drive
from inferloop.measure.quantiles import quantile
from inferloop.measure.timing import RequestTiming, schedule_delay_ms, ttft_ms


def send(task: Task) -> Sequence[RequestTiming]:
    load = task.load
    if load.rate is None:
        plan = closed(load.path, task.count, load.users)
    else:
        plan = requests(load.path, poisson(load.rate, task.count / load.rate, task.seed))
    (core,) = os.sched_getaffinity(0)
    options = DriveOptions(sender_cores=(core,), num_connections=load.users, cut_off_s=5.0)
    result = asyncio.run(drive(plan, Endpoint(task.url), options))
    failed = [t.error for t in result.timings if t.error is not None]
    if failed or len(result.timings) != len(plan):
        raise SystemExit(f"{len(failed)} failed, {result.num_unsent} were not sent: {result.details}")
    return result.timings


def main() -> None:
    task = task_of(Path(sys.argv[1]))
    timings = send(task)
    ttfts = sorted(t for r in timings if (t := ttft_ms(r)) is not None)
    delays = sorted(d for r in timings if (d := schedule_delay_ms(r)) is not None)
    told = {
        "ttft_p50": quantile(ttfts, 0.5),
        "ttft_p99": quantile(ttfts, 0.99),
        "late_p99": quantile(delays, 0.99) if delays else None,
        "intended_ns": sorted(r.t_intended_ns for r in timings if r.t_intended_ns is not None),
    }
    (task.folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()

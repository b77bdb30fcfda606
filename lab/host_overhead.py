"""What the engine costs beside its runner: microseconds of host work per step, by phase, while sequences decode.

    python lab/host_overhead.py --batch 1 8 32 128 --steps 400

The runner is the one without tensors, whose time is taken out. It is followed by a walk through memory (--evict-mib),
as a real step would have it: the host's own code and data come back from beyond the second-level cache. Prints, for
every batch size, the median and the tenth percentile of each phase; `between` is all that lies between the end of one
step of the runner and the beginning of the next, the phases and what is around them.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from inferloop.core.clock import RealClock
from inferloop.core.ids import TraceContext
from inferloop.core.request import Sampling, TokenRequest
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.compute.runner import GiveUp, RunnerInfo, never
from inferloop.engine.config import EngineConfig
from inferloop.engine.loop import Engine
from inferloop.engine.roster import TokenUpdate
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.step import StepPlan, StepResult

BLOCK_SIZE = 16


class Phases:
    """Time per step and phase, in ns."""

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []
        self._now: dict[str, int] = {}

    def add(self, name: str, ns: int) -> None:
        self._now[name] = self._now.get(name, 0) + ns

    def end_step(self) -> None:
        self.rows.append(self._now)
        self._now = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.add(name, time.perf_counter_ns() - start)

        return run


class TimedRunner:
    """An EchoRunner; tells when its steps begin and end."""

    def __init__(self, inner: EchoRunner, phases: Phases, num_evicted_bytes: int) -> None:
        self._inner, self._phases = inner, phases
        self._memory = np.zeros(max(1, num_evicted_bytes // 8))
        self._ended_ns: int | None = None
        self.only: int | None = None
        """Steps of this many tokens count, all others do not."""
        self._counts = False
        self.profile: cProfile.Profile | None = None

    @property
    def info(self) -> RunnerInfo:
        return self._inner.info

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        now = time.perf_counter_ns()
        if self.profile is not None:
            self.profile.disable()
        if self._ended_ns is not None and self._counts and plan.num_tokens == self.only:
            self._phases.add("between", now - self._ended_ns)
            self._phases.end_step()
        self._counts = plan.num_tokens == self.only
        self._inner.submit(plan, give_up)

    def wait(self) -> StepResult:
        result = self._inner.wait()
        self._memory.sum()
        self._phases._now = {}
        if self.profile is not None:
            self.profile.enable()
        self._ended_ns = time.perf_counter_ns()
        return result


def measure(batch: int, num_steps: int, num_prompt: int, evict_bytes: int, profiled: bool) -> list[dict[str, int]]:
    """Phases of every step in which all of `batch` sequences decode."""
    phases = Phases()
    length = num_prompt + num_steps + 2
    inner = EchoRunner(
        vocab_size=49152, context_length=length, block_size=BLOCK_SIZE, num_blocks=batch * (length // BLOCK_SIZE + 2)
    )
    runner = TimedRunner(inner, phases, evict_bytes)
    runner.only = batch
    done = threading.Semaphore(0)
    received: list[Sequence[TokenUpdate]] = []

    def on_updates(updates: Sequence[TokenUpdate]) -> None:
        received.append(updates)
        for _ in range(sum(u.finish_reason is not None for u in updates)):
            done.release()

    config = EngineConfig(max_step_tokens=max(256, batch), max_sequences=batch)
    engine = Engine(runner, config, RealClock(), phases.timed("deliver", on_updates))
    scheduler: Scheduler = engine._scheduler
    for name in ("schedule", "commit"):
        setattr(scheduler, name, phases.timed(name, getattr(scheduler, name)))
    sampling = Sampling(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    for i in range(batch):
        prompt = tuple((7 * i + k) % 49152 for k in range(num_prompt))
        engine.submit(TokenRequest(f"r{i}", prompt, sampling, TraceContext.new(), 1))
    if profiled:
        runner.profile = cProfile.Profile()
    engine.start()
    for _ in range(batch):
        done.acquire()
    engine.stop()
    if runner.profile is not None:
        runner.profile.disable()
        pstats.Stats(runner.profile).sort_stats("tottime").print_stats(28)
    return phases.rows[5:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=400, help="tokens generated per sequence")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--evict-mib", type=float, default=8.0, help="memory walked through after each step; 0: none")
    parser.add_argument("--profile", action="store_true", help="profile the host's work instead of trusting the times")
    options = parser.parse_args()
    summary = {}
    for batch in options.batch:
        rows = measure(batch, options.steps, options.prompt, int(options.evict_mib * 2**20), options.profile)
        for name in ("schedule", "commit", "deliver", "between"):
            values = sorted(row.get(name, 0) / 1000 for row in rows)
            low = values[len(values) // 10]
            print(f"{batch:4} sequences  {name:9} {statistics.median(values):8.1f} us   p10 {low:8.1f}")
            summary[f"{batch} {name}"] = round(statistics.median(values), 1)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

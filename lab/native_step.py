"""Where the time of a native step goes: the runner alone, without scheduler, tokenizer and HTTP.

    python lab/native_step.py --decode 1 8 32 --prefill 256 512 1500
    python lab/native_step.py --weights int8 --kv int8 --isa avx2 --threads 1

Decode steps are greedy, each of so many streams at contexts of --context and on, over shuffled KV blocks; prefill is
one prompt in one step. Of each the median and the fastest of its steps, as Python sees them, and per phase the
milliseconds that threads worked and waited for each other at its end, averaged over threads: the quantile --of over
steps, because a busy machine's mean says little. Rounds alternate between all points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import numpy as np

from inferloop.engine.compute.native import _native
from inferloop.engine.compute.native.config import NativeConfig
from inferloop.engine.compute.native.memory import BLOCK_SIZE
from inferloop.engine.compute.native.runner import NativeRunner
from inferloop.engine.schedule.step import Int32, SamplingColumns, StepPlan
from inferloop.models.resolve import resolve


class Point:
    """Sequences with memory of their own, and the time their steps took, in seconds."""

    def __init__(self, runner: NativeRunner, num: int, context: int, steps: int, rng: np.random.Generator) -> None:
        self.runner, self.num, self.context, self.steps = runner, num, context, steps
        width = -(-(context + steps + 1) // BLOCK_SIZE)
        blocks = rng.permutation(runner.info.num_blocks)[: num * width]
        assert len(blocks) == num * width, "more --kv-mib is needed"
        self.table = blocks.reshape(num, width).astype(np.int32)
        self.prompts = rng.integers(0, runner.info.vocab_size, (num, context)).astype(np.int32)
        self.seconds: list[float] = []
        self.profile: dict[str, list[tuple[float, float]]] = {}
        """Milliseconds of each phase, worked and waited, step by step."""
        self.outside: list[float] = []

    def plan(self, token_ids: Int32, position: int) -> StepPlan:
        """token_ids (sequences, tokens of each)."""
        n, each = token_ids.shape
        return StepPlan(
            step_id=0,
            slots=np.arange(n, dtype=np.int32),
            offsets=np.arange(n + 1, dtype=np.int32) * each,
            token_ids=token_ids.ravel(),
            first_positions=np.full(n, position, np.int32),
            block_tables=(self.table[:n],),
            sample_rows=np.arange(1, n + 1, dtype=np.int32) * each - 1,
            num_drafts=np.zeros(n, np.int32),
            sampling=SamplingColumns(
                temperature=np.zeros(n, np.float32),
                top_p=np.ones(n, np.float32),
                top_k=np.zeros(n, np.int32),
                min_p=np.zeros(n, np.float32),
                seed=np.zeros(n, np.uint64),
                num_logprobs=np.full(n, -1, np.int32),
            ),
        )

    def decode(self) -> None:
        for i in range(self.num):
            one = self.plan(self.prompts[i : i + 1], 0)
            self.run(replace(one, block_tables=(self.table[i : i + 1],)))
        tokens = self.prompts[:, -1:]
        for step in range(self.steps):
            tokens = self.measure(self.plan(tokens, self.context + step)).reshape(-1, 1)

    def prefill(self) -> None:
        self.measure(self.plan(self.prompts, 0))

    def run(self, plan: StepPlan) -> Int32:
        self.runner.submit(plan)
        return self.runner.wait().token_ids

    def measure(self, plan: StepPlan) -> Int32:
        self.runner.profile()
        begin, begin_ticks = time.perf_counter(), _native.ticks()
        token_ids = self.run(plan)
        seconds, ticks = time.perf_counter() - begin, _native.ticks() - begin_ticks
        self.seconds.append(seconds)
        ms_of = 1e3 * seconds / ticks
        total = 0.0
        for phase, threads in self.runner.profile().items():
            worked, waited = (sum(column) * ms_of / len(threads) for column in zip(*threads, strict=True))
            self.profile.setdefault(phase, []).append((worked, waited))
            total += worked + waited
        self.outside.append(1e3 * seconds - total)
        return token_ids

    def forget(self) -> None:
        for values in (self.seconds, self.profile, self.outside):
            values.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--weights", default="stored", choices=["stored", "fp32", "bf16", "int8"])
    parser.add_argument("--kv", default="bf16", choices=["bf16", "int8"])
    parser.add_argument("--isa", default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 32], help="numbers of streams")
    parser.add_argument("--prefill", type=int, nargs="*", default=[256, 512, 1500], help="lengths of prompts")
    parser.add_argument("--context", type=int, default=256, help="tokens of a stream when its first step is measured")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a round")
    parser.add_argument("--of", type=float, default=0.5, help="which quantile of the steps' phases is told")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-mib", type=int, default=600)
    options = parser.parse_args()

    config = NativeConfig(
        weights=options.weights,
        kv=options.kv,
        isa=options.isa,
        num_threads=options.threads,
        kv_memory_bytes=options.kv_mib << 20,
    )
    runner = NativeRunner.load(resolve(options.model), config)
    print(runner.info.dtype, runner.info.revision, f"{options.threads} threads")
    rng = np.random.default_rng(0)
    decodes = {f"decode {n}": Point(runner, n, options.context, options.steps, rng) for n in options.decode}
    prefills = {f"prefill {n}": Point(runner, 1, n, 1, rng) for n in options.prefill}
    for round_number in range(-1, options.rounds):  # round -1 warms up
        for point in decodes.values():
            point.decode()
        for point in prefills.values():
            for _ in range(3):
                point.prefill()
        if round_number < 0:
            for point in (*decodes.values(), *prefills.values()):
                point.forget()
    found = {}
    for name, point in {**decodes, **prefills}.items():
        per_step = point.num if name in decodes else point.context
        median, least = statistics.median(point.seconds), min(point.seconds)
        found[name] = round(per_step / median, 1)
        print(f"\n{name}: {1e3 * median:.3f} ms (least {1e3 * least:.3f}), {per_step / median:.0f} tok/s")
        total = 0.0
        for phase, steps in point.profile.items():
            work, wait = (float(np.quantile(column, options.of)) for column in zip(*steps, strict=True))
            total += work + wait
            if work + wait > 0:
                print(f"  {phase:10} {work:8.4f} ms   waiting {wait:8.4f} ms")
        print(f"  {'all':10} {total:8.4f} ms; outside of phases {np.quantile(point.outside, options.of):.4f} ms")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

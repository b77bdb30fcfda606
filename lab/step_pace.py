"""What an objective for the time per token does to the answers beside a long prompt, and what background work costs.

    OMP_NUM_THREADS=1 python lab/step_pace.py [--objective-ms 60]

In this process, the embedded model: gaps of an answer that runs while a long prompt comes in, times to first token of
short requests beside background work and alone, and how well the engine foretells its own steps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Sequence

from inferloop.backends.native import NativeGenerator
from inferloop.backends.native_load import load_native
from inferloop.backends.native_options import NativeOptions
from inferloop.backends.protocols import GenerateRequest, Prompt
from inferloop.core.ids import TraceContext
from inferloop.core.request import BATCH_PRIORITY, Sampling
from inferloop.engine import loop
from inferloop.engine.schedule import pacer
from inferloop.engine.schedule.step import StepPlan
from inferloop.measure.quantiles import quantile
from inferloop.models.resolve import resolve

WORDS = ("alpha", "beta", "gamma", "delta", "house", "tree")


class Watched(pacer.Pacer):
    """Keeps (milliseconds, foretold milliseconds) of every step."""

    steps: list[tuple[float, float]] = []  # noqa: RUF012  one engine per process

    def observe(self, plan: StepPlan, ms: float) -> None:
        num_decodes = pacer.num_decoding(plan)
        self.steps.append((ms, self.time.predict(plan.num_tokens - num_decodes, num_decodes)))
        super().observe(plan, ms)


async def ask(
    generator: NativeGenerator, rng: random.Random, num_words: int, num_out: int, priority: int = 0
) -> tuple[float, list[float]]:
    """(time to first token, gaps), in milliseconds."""
    text = " ".join(rng.choice(WORDS) for _ in range(num_words))
    sampling = Sampling(max_tokens=num_out, ignore_eos=True, temperature=0.0)
    t_ns = time.monotonic_ns()
    request = GenerateRequest("r", TraceContext.new(), Prompt(text=text), sampling, t_ns, priority=priority)
    stamps = [delta.t_ns async for delta in generator.generate(request)]
    return (stamps[0] - t_ns) / 1e6, [(b - a) / 1e6 for a, b in itertools.pairwise(stamps)]


async def main(objective_ms: float | None) -> None:
    options = NativeOptions(num_threads=1, tpot_objective_ms=objective_ms)
    generator, rng = load_native(resolve("smollm2-135m-instruct"), options), random.Random(1)
    generator.start()
    await ask(generator, rng, 100, 10)
    running = asyncio.create_task(ask(generator, rng, 10, 150))
    await asyncio.sleep(0.5)
    ttft_ms, _ = await ask(generator, rng, 900, 1)
    tell("gaps beside a long prompt", (await running)[1])
    print(f"  its own time to first token {ttft_ms:.0f} ms")

    jobs = [asyncio.create_task(ask(generator, rng, 100, 40, BATCH_PRIORITY)) for _ in range(16)]
    for name in ("beside background work", "alone"):
        ttfts_ms = []
        for _ in range(12):
            await asyncio.sleep(0.7)
            ttfts_ms.append((await ask(generator, rng, 30, 3))[0])
        tell(f"time to first token {name}", ttfts_ms)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    tell("steps", [ms for ms, _ in Watched.steps])
    errors = [abs(ms - foretold) / ms for ms, foretold in Watched.steps[20:]]
    found = [quantile(sorted(errors), q) for q in (0.5, 0.9)]
    print("foretold with a relative error of p50 {:.2f}, p90 {:.2f}".format(*found))
    generator.stop()


def tell(what: str, values_ms: Sequence[float]) -> None:
    ordered = sorted(values_ms)
    found = "  ".join(f"{name} {quantile(ordered, q):.0f}" for name, q in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)))
    print(f"{what}, ms: {found}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objective-ms", type=float, default=None)
    vars(loop)["Pacer"] = Watched
    asyncio.run(main(parser.parse_args().objective_ms))

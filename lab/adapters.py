"""What adapters add to a decode step of eight streams: `python -m lab.adapters --compute native`.

One step is computed again and again, its streams going through no adapter, all through one, or through four; the
variants take turns, so that a slow second of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.adapters import write_adapter

from inferloop.backends.native_choice import load_runner
from inferloop.backends.native_options import NativeOptions
from inferloop.core.request import Sampling
from inferloop.engine.compute.adapter import load_adapter
from inferloop.engine.compute.runner import AdapterRunner, Runner
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import Int32, StepPlan
from inferloop.models.adapters.read import read_adapter
from inferloop.models.resolve import resolve

NUM_STREAMS, CONTEXT = 8, 128
# In the order in which the scheduler has streams.
VARIANTS: dict[str, Int32 | None] = {
    "none": None,
    "one, all streams": np.zeros(NUM_STREAMS, np.int32),
    "one, half of them": np.array([-1, 0], np.int32).repeat(4),
    "four": np.arange(4, dtype=np.int32).repeat(2),
}


def decode_plan(runner: Runner) -> StepPlan:
    """The step after that which computed the prompts."""
    info = runner.info
    sizes = {name: getattr(info, name) for name in ("vocab_size", "context_length", "block_size", "num_blocks")}
    scheduler = Scheduler(ScheduleConfig(max_step_tokens=NUM_STREAMS * CONTEXT, share_prefixes=False, **sizes))
    random = np.random.default_rng(0)
    for i in range(NUM_STREAMS):
        prompt = tuple(random.integers(10, info.vocab_size, CONTEXT).tolist())
        scheduler.add(SequenceSpec(str(i), prompt, Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)))
    plan = scheduler.schedule()
    assert plan is not None
    runner.submit(plan)
    scheduler.commit(plan, runner.wait())
    plan = scheduler.schedule()
    assert plan is not None and plan.num_tokens == NUM_STREAMS
    return plan


@contextmanager
def with_adapters(runner: Runner, options: NativeOptions, model: str, rank: int) -> Iterator[None]:
    assert isinstance(runner, AdapterRunner)
    header = resolve(model, cache_dir=options.cache_dir).header
    with tempfile.TemporaryDirectory() as folder:
        for slot in range(4):
            path = write_adapter(Path(folder) / str(slot), header, seed=slot, rank=rank, spread=0.03)
            runner.set_adapter(slot, runner.prepare_adapter(load_adapter(read_adapter(path, header, max_rank=rank))))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--compute", default="native", choices=["native", "torch"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    options = NativeOptions(compute=arguments.compute, kv_memory_mib=256)
    runner = load_runner(resolve(arguments.model), options)
    plan = decode_plan(runner)
    for rank in arguments.ranks:
        with with_adapters(runner, options, arguments.model, rank):
            times: dict[str, list[float]] = {name: [] for name in VARIANTS}
            for _ in range(arguments.rounds):
                for name, adapters in VARIANTS.items():
                    begin = time.perf_counter()
                    runner.submit(replace(plan, adapters=adapters))
                    runner.wait()
                    times[name].append(time.perf_counter() - begin)
        base = statistics.median(times["none"])
        for name, taken in times.items():
            middle = statistics.median(taken)
            print(f"rank {rank}, {name}: {1e3 * middle:.2f} ms a step, {middle / base:.2f} of none")


if __name__ == "__main__":
    main()

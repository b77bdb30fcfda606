"""How fast the engine is by itself: in this process, without HTTP and without a tokenizer.

    python -m lab.offline --batch 1 8 32 --rounds 5
    python -m lab.offline --modes native-stored native-stored/int8 native-stored@avx2 torch-bf16 --batch 1 8

Every round measures each mode and batch size once, so that a slow minute of the machine hits all of them alike; the
medians and the extremes over the rounds are printed, with several modes also the medians of each round's ratio to the
first. Prompts are random ids, different each time; generation ignores the end token. "decode" is what all streams get
together once the last of them has begun; "output" counts the prefill too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
from collections.abc import Sequence

from lab import modes
from lab.modes import Mode
from lab.peers.point import Point, Timing

from inferloop.core.clock import RealClock
from inferloop.core.ids import TraceContext
from inferloop.core.request import Sampling, TokenRequest
from inferloop.engine.compute.runner import Runner
from inferloop.engine.config import EngineConfig
from inferloop.engine.loop import Engine
from inferloop.engine.roster import TokenUpdate
from inferloop.models.resolve import resolve


class Bench:
    """One engine, and batches of requests that are waited for."""

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self._clock = RealClock()
        self._done = threading.Semaphore(0)
        self._updates: list[TokenUpdate] = []
        self.engine = Engine(runner, config, self._clock, self._collect)
        self.engine.start()
        self._num_sent = 0

    def _collect(self, updates: Sequence[TokenUpdate]) -> None:
        self._updates += updates
        for _ in range(sum(u.finish_reason is not None for u in updates)):
            self._done.release()

    def run(self, prompts: Sequence[Sequence[int]], num_output: int, temperature: float = 0.0) -> Timing:
        """Submit together, wait for all."""
        self._updates.clear()
        sampling = Sampling(temperature=temperature, seed=1, max_tokens=num_output, ignore_eos=True)
        started = self._clock.now_ns()
        first: dict[str, int] = {}
        for prompt in prompts:
            self._num_sent += 1
            first[f"r{self._num_sent}"] = 0
            request = TokenRequest(f"r{self._num_sent}", tuple(prompt), sampling, TraceContext.new(), started)
            self.engine.submit(request)
        for _ in prompts:
            self._done.acquire()
        last, counts = dict(first), dict(first)
        for update in self._updates:
            if update.token_ids:
                name = update.request_id
                first[name] = first[name] or update.t_ns
                last[name] = update.t_ns
                counts[name] += len(update.token_ids)
        first_s, last_s = ([(t_ns - started) / 1e9 for t_ns in moments.values()] for moments in (first, last))
        return Timing(first_s, last_s, list(counts.values()))

    def measure(self, point: Point, rng: random.Random, temperature: float) -> dict[str, float]:
        """What one run of a point tells, in tokens/s."""
        prompts = point.prompts(self.engine.info.vocab_size, rng.getrandbits(32))
        timing = self.run(prompts, point.output, temperature).check(point)
        if point.output == 1:
            return {f"prefill {point.prompt}": timing.prefill_tok_s(point)}
        return {f"decode x{point.streams}": self._decode_tok_s(), f"output x{point.streams}": timing.output_tok_s}

    def _decode_tok_s(self) -> float:
        first: dict[str, int] = {}
        for update in self._updates:
            first.setdefault(update.request_id, update.t_ns)
        begin, end = max(first.values()), max(u.t_ns for u in self._updates)
        return sum(len(u.token_ids) for u in self._updates if u.t_ns > begin) / (end - begin) * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--modes", nargs="+", default=["torch-bf16"], type=Mode, metavar="MODE", help=modes.__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of the decode runs")
    parser.add_argument("--output", type=int, default=64, help="tokens generated per sequence")
    parser.add_argument("--prefill", type=int, nargs="*", default=[256, 512], help="prompt lengths of the prefill runs")
    parser.add_argument("--budget", type=int, default=256, help="tokens per step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    files = resolve(options.model)
    config = EngineConfig(max_step_tokens=options.budget, max_sequences=max(options.batch))
    num_tokens = max(options.batch) * (options.prompt + options.output + modes.BLOCK_SIZE)
    num_tokens = max(num_tokens, *options.prefill, 0) + modes.BLOCK_SIZE
    benches = {}
    for mode in options.modes:
        runner = mode.load(files, num_threads=options.threads, num_tokens=num_tokens)
        benches[mode.name] = Bench(runner, config)
    points = [Point(1, num, 1) for num in options.prefill]
    points += [Point(batch, options.prompt, options.output) for batch in options.batch]
    rng = random.Random(0)
    samples: dict[tuple[str, str], list[float]] = {}
    for round_number in range(-1, options.rounds):  # round -1 warms up
        for point in points:
            for mode_name, bench in benches.items():
                for name, value in bench.measure(point, rng, options.temperature).items():
                    if round_number >= 0:
                        samples.setdefault((name, mode_name), []).append(value)
    for bench in benches.values():
        bench.engine.stop()
    reference = options.modes[0].name
    width = max(map(len, benches))
    for (name, mode_name), values in samples.items():
        ratios = [a / b for a, b in zip(values, samples[name, reference], strict=True)]
        ratio = f"   x{statistics.median(ratios):.2f}" if mode_name != reference else ""
        middle, low, high = statistics.median(values), min(values), max(values)
        print(f"{name:12} {mode_name:{width}} {middle:8.1f} tok/s   [{low:.1f} .. {high:.1f}]{ratio}")
    print(json.dumps({f"{name} {mode}": round(statistics.median(v), 1) for (name, mode), v in samples.items()}))


if __name__ == "__main__":
    main()

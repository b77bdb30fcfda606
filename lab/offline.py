"""How fast the engine is by itself: in this process, without HTTP and without a tokenizer.

    python lab/offline.py --batch 1 8 32 --rounds 5
    python lab/offline.py --modes bf16 fp32 deterministic --batch 1 8

Every round measures each mode and batch size once, so that a slow minute of the machine hits all of them alike; the
medians and the extremes over the rounds are printed, with several modes also the medians of each round's ratio to the
first. Prompts are random ids, different each time; generation ignores the end
token. Decode counts the tokens between the moment the last sequence got its first token and the end.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
from collections.abc import Callable, Sequence
from functools import partial

from inferloop.core.clock import RealClock
from inferloop.core.ids import TraceContext
from inferloop.core.request import Sampling, TokenRequest
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.config import EngineConfig
from inferloop.engine.loop import Engine
from inferloop.engine.roster import TokenUpdate
from inferloop.models.resolve import resolve

MODES = {"bf16": ("bf16", False), "fp32": ("fp32", False), "deterministic": ("fp32", True)}


class Bench:
    """One engine, and batches of requests that are waited for."""

    def __init__(self, runner: TorchRunner, config: EngineConfig, seed: int) -> None:
        self._clock, self._rng = RealClock(), random.Random(seed)
        self._done = threading.Semaphore(0)
        self._updates: list[TokenUpdate] = []
        self.engine = Engine(runner, config, self._clock, self._collect)
        self.engine.start()
        self._num_sent = 0

    def _collect(self, updates: Sequence[TokenUpdate]) -> None:
        self._updates += updates
        for _ in range(sum(u.finish_reason is not None for u in updates)):
            self._done.release()

    def run(self, batch: int, num_prompt: int, num_output: int, temperature: float) -> tuple[int, list[TokenUpdate]]:
        """Submit together, wait for all; (time of the submission in ns, every update)."""
        self._updates.clear()
        vocab = self.engine.info.vocab_size
        sampling = Sampling(temperature=temperature, seed=1, max_tokens=num_output, ignore_eos=True)
        started = self._clock.now_ns()
        for _ in range(batch):
            self._num_sent += 1
            prompt = tuple(self._rng.randrange(vocab) for _ in range(num_prompt))
            self.engine.submit(TokenRequest(f"r{self._num_sent}", prompt, sampling, TraceContext.new(), started))
        for _ in range(batch):
            self._done.acquire()
        return started, list(self._updates)

    def prefill_tok_s(self, num_prompt: int) -> float:
        started, updates = self.run(1, num_prompt, 1, 0.0)
        return num_prompt / (updates[0].t_ns - started) * 1e9

    def decode_tok_s(self, batch: int, num_prompt: int, num_output: int, temperature: float) -> float:
        _, updates = self.run(batch, num_prompt, num_output, temperature)
        first: dict[str, int] = {}
        for update in updates:
            first.setdefault(update.request_id, update.t_ns)
        begin, end = max(first.values()), max(u.t_ns for u in updates)
        return sum(len(u.token_ids) for u in updates if u.t_ns > begin) / (end - begin) * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--modes", nargs="+", default=["bf16"], choices=MODES)
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
    engine = EngineConfig(max_step_tokens=options.budget, max_sequences=max(options.batch))
    benches = {}
    for mode in options.modes:
        dtype, deterministic = MODES[mode]
        config = TorchConfig(dtype=dtype, num_threads=options.threads, deterministic=deterministic)
        benches[mode] = Bench(TorchRunner.load(files, config), engine, seed=0)
    samples: dict[tuple[str, str], list[float]] = {}
    for round_number in range(-1, options.rounds):  # round -1 warms up
        for name, measure in measures(options).items():
            for mode, bench in benches.items():
                value = measure(bench)
                if round_number >= 0:
                    samples.setdefault((name, mode), []).append(value)
    for bench in benches.values():
        bench.engine.stop()
    for (name, mode), values in samples.items():
        ratios = [a / b for a, b in zip(values, samples[name, options.modes[0]], strict=True)]
        ratio = f"   x{statistics.median(ratios):.2f}" if mode != options.modes[0] else ""
        low, high = min(values), max(values)
        print(f"{name:12} {mode:13} {statistics.median(values):8.1f} tok/s   [{low:.1f} .. {high:.1f}]{ratio}")
    print(json.dumps({f"{name} {mode}": round(statistics.median(v), 1) for (name, mode), v in samples.items()}))


def measures(options: argparse.Namespace) -> dict[str, Callable[[Bench], float]]:
    """What a round measures of each mode, in tokens/s."""
    found: dict[str, Callable[[Bench], float]] = {}
    for num in options.prefill:
        found[f"prefill {num}"] = partial(Bench.prefill_tok_s, num_prompt=num)
    for batch in options.batch:
        found[f"decode x{batch}"] = partial(
            Bench.decode_tok_s,
            batch=batch,
            num_prompt=options.prompt,
            num_output=options.output,
            temperature=options.temperature,
        )
    return found


if __name__ == "__main__":
    main()

"""How fast the engine is by itself: in this process, without HTTP and without a tokenizer.

    python lab/offline.py --batch 1 8 32 --rounds 5

Every round measures each batch size once, so that a slow minute of the machine hits all of them alike; the medians
and the extremes over the rounds are printed. Prompts are random ids, different each time; generation ignores the end
token. Decode counts the tokens between the moment the last sequence got its first token and the end.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
from collections.abc import Sequence

from inferloop.core.clock import RealClock
from inferloop.core.ids import TraceContext
from inferloop.core.request import Sampling, TokenRequest
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.config import EngineConfig
from inferloop.engine.loop import Engine
from inferloop.engine.roster import TokenUpdate
from inferloop.models.resolve import resolve


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
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of the decode runs")
    parser.add_argument("--output", type=int, default=64, help="tokens generated per sequence")
    parser.add_argument("--prefill", type=int, nargs="*", default=[256, 512], help="prompt lengths of the prefill runs")
    parser.add_argument("--budget", type=int, default=256, help="tokens per step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    config = TorchConfig(dtype=options.dtype, num_threads=options.threads, deterministic=options.deterministic)
    runner = TorchRunner.load(resolve(options.model), config)
    bench = Bench(runner, EngineConfig(max_step_tokens=options.budget, max_sequences=max(options.batch)), seed=0)
    samples: dict[str, list[float]] = {}
    for round_number in range(-1, options.rounds):  # round -1 warms up
        found = {f"prefill {n}": bench.prefill_tok_s(n) for n in options.prefill}
        for batch in options.batch:
            tok_s = bench.decode_tok_s(batch, options.prompt, options.output, options.temperature)
            found[f"decode x{batch}"] = tok_s
        if round_number >= 0:
            for name, value in found.items():
                samples.setdefault(name, []).append(value)
    bench.engine.stop()
    for name, values in samples.items():
        print(f"{name:14} {statistics.median(values):8.1f} tok/s   [{min(values):.1f} .. {max(values):.1f}]")
    print(json.dumps({name: round(statistics.median(values), 1) for name, values in samples.items()}))


if __name__ == "__main__":
    main()

"""What sampling costs a step: from the logits of 32 rows to their tokens, on each level of this machine.

    python -m lab.native_sampling --rows 32 --vocab 49152 --threads 2

The logits are there already, as the head would have left them slice by slice; with so many rows they come from the
outer cache, where those of a real step are still in the inner one. Two kinds of logits: independent normal ones, whose
tail is long, and ones as peaked as a language model's. Milliseconds: the slices, then the full rows; the least of all
rounds, in which the levels take turns.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferloop.engine.compute.native import _native
from inferloop.engine.schedule.step import PromptRows, SamplingColumns, StepPlan

ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
WISHES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "top-p 0.99, temperature 2": {"top_p": 0.99, "temperature": 2},
    "greedy, 5 logprobs": {"temperature": 0, "num_logprobs": 5},
}


def plan_of(n: int, **wish: float) -> StepPlan:
    """n sequences, one token each, that all wish the same."""
    defaults = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "num_logprobs": -1} | wish
    types = {"top_k": np.int32, "num_logprobs": np.int32}
    columns: dict[str, Any] = {name: np.full(n, value, types.get(name, np.float32)) for name, value in defaults.items()}
    return StepPlan(
        step_id=1,
        slots=np.arange(n, dtype=np.int32),
        offsets=np.arange(n + 1, dtype=np.int32),
        token_ids=np.zeros(n, np.int32),
        first_positions=np.arange(300, 300 + n, dtype=np.int32),
        block_tables=(np.zeros((n, 99), np.int32),),
        sample_rows=np.arange(n, dtype=np.int32),
        num_drafts=np.zeros(n, np.int32),
        sampling=SamplingColumns(seed=np.arange(n, dtype=np.uint64), **columns),
    )


def prompts_of(n: int) -> StepPlan:
    """The same tokens, none of which is sampled, and the 5 likeliest after each."""
    plan = plan_of(n)
    every = np.arange(n, dtype=np.int32)
    rows = PromptRows(flat=every, owners=every, targets=every, num_top=np.full(n, 5, np.int32))
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    return StepPlan(**fields | {"sample_rows": np.full(n, -1, np.int32), "prompt_rows": rows})


def normal(rng: np.random.Generator, rows: int, vocab: int) -> NDArray[np.float32]:
    return rng.normal(0, 3, (rows, vocab)).astype(np.float32)


def peaked(rng: np.random.Generator, rows: int, vocab: int) -> NDArray[np.float32]:
    """Most of the probability on some tens of tokens: normal logits and a few far above them."""
    logits = normal(rng, rows, vocab)
    for row in logits:
        row[rng.choice(vocab, 60, replace=False)] = rng.normal(17, 2, 60)
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    levels = [name for name in ISAS[: ISAS.index(_native.best_isa()) + 1] if name in ("scalar", "avx2", "avx512")]
    plans = {name: plan_of(args.rows, **wish) for name, wish in WISHES.items()} | {"prompt": prompts_of(args.rows)}
    rng = np.random.default_rng(0)
    print(f"{args.rows} rows x {args.vocab}, {args.threads} threads, ms (slices + full rows)")
    for logits in (normal(rng, args.rows, args.vocab), peaked(rng, args.rows, args.vocab)):
        benches = {level: _native.sampling.Bench(level, args.vocab, args.threads) for level in levels}
        for bench in benches.values():
            bench.load(logits)
        for name, plan in plans.items():
            best = dict.fromkeys(levels, (float("inf"), 0.0, 0.0))
            for i in range(args.rounds):
                for level in levels:
                    if level != "scalar" or i < 3:
                        slices, full = benches[level].run(plan)["seconds"]
                        best[level] = min(best[level], (slices + full, slices, full))
            row = "  ".join(f"{level} {s * 1e3:6.3f} + {f * 1e3:6.3f}" for level, (_, s, f) in best.items())
            print(f"{name:28} {row}")


if __name__ == "__main__":
    main()

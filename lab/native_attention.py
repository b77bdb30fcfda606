"""What paged attention costs: microseconds per layer and GB/s of keys and values, beside what this machine reads.

Decoding reads every key and value of a step once, from blocks in random places; all layers in turn, so that a layer is
as cold as in a step. Prefill is one prompt. SmolLM2-135M's shape: 9 query heads, 3 KV heads of 64, 30 layers.

    python -m lab.native_attention [--isa LEVEL] [--kv bf16 int8] [--threads 2] [--rounds 7]
"""

from __future__ import annotations

import argparse
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferloop.engine.compute.native import _native

attention: Any = _native.attention
LAYERS, QUERY_HEADS, KV_HEADS, DIM, BLOCK = 30, 9, 3, 64, 16


def make_cache(num_blocks: int, kv: str) -> NDArray[np.uint8]:
    """Numbers of about 1 in huge pages; only what is read of them matters, not what they are."""
    shape = (LAYERS, num_blocks, KV_HEADS, attention.head_bytes(kv, DIM))
    memory = mmap.mmap(-1, int(np.prod(shape)) + 2**21)
    memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)
    start = -buffer.ctypes.data % 2**21
    cache: NDArray[np.uint8] = buffer[start : start + int(np.prod(shape))].reshape(shape)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((num_blocks * BLOCK, KV_HEADS, DIM), dtype=np.float32) for _ in range(2))
    attention.write(_native.best_isa(), kv, cache, 0, np.arange(num_blocks, dtype=np.int32), 0, k, v)
    cache[1:] = cache[:1]
    return cache


class Workload:
    def __init__(self, name: str, kv: str, contexts: list[int], rows: int) -> None:
        """`rows` at the end of each context."""
        self.name, self.kv, self.contexts, self.rows = name, kv, contexts, rows
        counts = [-(-context // BLOCK) for context in contexts]
        self.cache = make_cache(sum(counts), kv)
        self.table = np.full((len(contexts), max(counts)), -1, np.int32)
        places = np.random.default_rng(1).permutation(sum(counts)).astype(np.int32)
        for i, blocks in enumerate(np.split(places, np.cumsum(counts)[:-1])):
            self.table[i, : len(blocks)] = blocks
        self.offsets = np.arange(0, rows * len(contexts) + 1, rows, dtype=np.int32)
        self.first = np.array([context - rows for context in contexts], np.int32)
        shape = (rows * len(contexts), QUERY_HEADS, DIM)
        self.q = np.random.default_rng(2).standard_normal(shape, dtype=np.float32)
        self.out = np.empty_like(self.q)

    def seconds(self, isa: str, threads: int, num_times: int) -> NDArray[np.float64]:
        """(num_times, layers), the first time, which is colder, left out."""
        times = attention.attend(
            isa, threads, self.kv, self.cache, LAYERS, self.offsets, self.first, self.table, self.q, self.out,
            DIM**-0.5, 0, 0.0, num_times + 1,
        )  # fmt: skip
        return np.array(times).reshape(-1, LAYERS)[1:]

    @property
    def kv_bytes(self) -> int:
        blocks = sum(-(-context // BLOCK) for context in self.contexts)
        return int(blocks * KV_HEADS * LAYERS * attention.head_bytes(self.kv, DIM))

    @property
    def macs(self) -> int:
        seen = sum(sum(range(context - self.rows + 1, context + 1)) for context in self.contexts)
        return LAYERS * QUERY_HEADS * seen * 2 * DIM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="+", default=[_native.best_isa()])
    parser.add_argument("--kv", nargs="+", default=["bf16", "int8"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=["decode", "prefill"])
    args = parser.parse_args()
    loads = []
    for kv in args.kv:
        if "decode" in args.only:
            for context in (320, 2048):
                loads += [Workload(f"decode {n}x{context}", kv, [context] * n, 1) for n in (1, 8, 32)]
        if "prefill" in args.only:
            loads += [Workload(f"prefill {n}", kv, [n], n) for n in (256, 512, 1500)]
    seconds: dict[tuple[str, int], list[NDArray[np.float64]]] = {}
    for _ in range(args.rounds):
        for isa in args.isa:
            for i, load in enumerate(loads):
                num_times = 3 if load.kv_bytes < 5e8 else 1
                seconds.setdefault((isa, i), []).append(load.seconds(isa, args.threads, num_times))
    print(f"{'':18}{'kv':6}{'level':13}{'us/layer':>10}{'min':>10}{'GB/s':>8}{'GMAC/s':>8}")
    for (isa, i), found in seconds.items():
        # What others do to this machine comes in bursts longer than a layer: its minimum is nearly free of it.
        load, times = loads[i], np.concatenate(found)
        median, low = float(np.median(times) * LAYERS), float(times.min(0).sum())
        print(
            f"{load.name:18}{load.kv:6}{isa:13}{median / LAYERS * 1e6:10.1f}{low / LAYERS * 1e6:10.1f}"
            f"{load.kv_bytes / low / 1e9:8.1f}{load.macs / low / 1e9:8.1f}"
        )


if __name__ == "__main__":
    main()

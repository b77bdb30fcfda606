"""How fast the native products are, beside what the machine could do.

    python -m lab.native_matmul
    python -m lab.native_matmul --isa avx512_bf16 avx2 --rows 1 8 128 --formats q4_1

The matrices of a Llama-like model of 135 million parameters (hidden size 576, 30 layers, 49,152 tokens), for each
format all of them one after the other, as a step multiplies them, with a barrier between. In every round the machine is
measured first, then variants take turns; medians.

`GB/s` of weights, beside reading a working set of that size; `GMAC/s` beside the peak of the multiplier that the format
uses (int8 for groups). A product that memory bounds is good when the first share is near 1, one that arithmetic bounds
when the second is: groups give at least 2 of 10 (4-bit with mins 3 of 11) multiplier slots to scales.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from inferloop.core.hardware import OpKind
from inferloop.engine.compute.native import _native
from inferloop.engine.compute.native.config import Isa
from inferloop.engine.compute.native.hardware import measure

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
NUM_LAYERS = 30
TILE, GROUP = 16, 32
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)


@dataclass(frozen=True, slots=True)
class Kind:
    """`format` and `options` as `_native.matmul.Matrix` takes them; `record_bytes` of 32 inputs of a tile."""

    format: str
    record_bytes: int
    op_kind: OpKind
    options: dict[str, Any]


KINDS = {
    "q4_1": Kind("group", 16 * (16 + 4), "int8", {"bits": 4, "has_min": True}),
    "q8_0": Kind("group", 16 * (32 + 2), "int8", {"offset": 128}),
    "q6_k": Kind("group", 16 * (32 + 8), "int8", {"group": 16, "offset": 32, "wide": True}),
    "bf16": Kind("bf16", 16 * 64, "bf16", {}),
    "f32": Kind("f32", 16 * 128, "fp32", {}),
}


def model_of(kind: Kind) -> tuple[list[Any], int, int]:
    """Its matrices, their bytes, and the products of one row."""
    shapes = [*LAYER * NUM_LAYERS, HEAD]
    sizes = [-(-k // GROUP * kind.record_bytes // 64) * 64 for _, k in shapes]
    num_bytes = sum(n // TILE * size for (n, _), size in zip(shapes, sizes, strict=True))
    room = np.full(num_bytes + 64, 0x11, np.uint8)
    at = -room.ctypes.data % 64
    matrices = []
    for (n, k), size in zip(shapes, sizes, strict=True):
        data = room[at : at + n // TILE * size]
        matrices.append(_native.matmul.Matrix(kind.format, n, k, data, size, **kind.options))
        at += data.size
    return matrices, num_bytes, sum(n * k for n, k in shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="+", choices=get_args(Isa), default=[_native.best_isa()])
    parser.add_argument("--formats", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-tiles", type=int, default=8, help="tiles that a thread takes at a time")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cores = os.sched_getaffinity(0)

    models = {name: model_of(KINDS[name]) for name in options.formats}
    times: dict[tuple[str, str, int], list[float]] = {}
    reads: dict[int, list[float]] = {}
    peaks: dict[OpKind, list[float]] = {}
    sizes = sorted({num_bytes for _, num_bytes, _ in models.values()})
    for _ in range(options.rounds):
        os.sched_setaffinity(0, cores)
        hardware = measure(sizes, 1.0, threads=[options.threads])
        os.sched_setaffinity(0, {0})  # the sweep's helpers are pinned to the other cores
        for read in hardware.bandwidth:
            reads.setdefault(read.working_set_bytes, []).append(read.bytes_per_s)
        best: dict[OpKind, float] = {}
        for peak in hardware.peaks:
            best[peak.kind] = max(best.get(peak.kind, 0.0), peak.ops_per_s / 2)
        for kind, rate in best.items():
            peaks.setdefault(kind, []).append(rate)
        for name in options.formats:
            for isa in options.isa:
                for m in options.rows:
                    seconds = _native.matmul.sweep(
                        isa, models[name][0], m, options.threads, options.max_tiles, max(2, 24 // (m + 1))
                    )
                    times.setdefault((name, isa, m), []).extend(seconds)

    print(f"{options.threads} threads, best level {_native.best_isa()}")
    print(
        "| format | level | rows | ms (best) | GB/s | of read | GMAC/s | of peak |\n|---|---|---|---|---|---|---|---|"
    )
    for (name, isa, m), seconds in times.items():
        _, num_bytes, macs = models[name]
        median = statistics.median(seconds)
        read_rate = statistics.median(reads[min(reads, key=lambda size: abs(size - num_bytes))])
        peak_rate = statistics.median(peaks.get(KINDS[name].op_kind, [math.nan]))
        weights, products = num_bytes / median, macs * m / median
        print(
            f"| {name} | {isa} | {m} | {median * 1e3:.2f} ({min(seconds) * 1e3:.2f}) | {weights / 1e9:.1f} "
            f"| {weights / read_rate:.0%} | {products / 1e9:.0f} | {products / peak_rate:.0%} |"
        )


if __name__ == "__main__":
    main()

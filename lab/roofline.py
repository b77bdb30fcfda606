"""How much of what the machine could do the native runner reaches, step by step.

    python -m lab.roofline
    python -m lab.roofline --weights bf16 --batch 1 8 --parts

In every round the machine is measured first: reading working sets as large as those of the steps to come, and
multiplying. Then the engine runs each point, alone in this process: decoding at --batch streams, and prefilling
--prefill tokens; greedy, random prompts. Every step of the runner is timed and set against what it had to move and to
compute (core/step_cost, plan/roofline), at the bandwidth of the same round and the same working set. Printed are
medians over the rounds, of the median step of a decode and of all steps of a prompt together.

`memory`: weights and KV once, at that bandwidth. `compute`: all operations at the peak of their kind. `of format`: the
same where scales of groups go through the units that multiply: 8 products of 32 inputs, and 2 to 6 instructions for
what they are worth. Memory and arithmetic work at the same time, so the longer of the two is a bound, not their sum:
`roof` is the share of the measured step that the longer of memory and compute is, which nobody passes; `attainable`
that of the longer of memory and `of format`, which no kernel for these weights passes. `in turn` lets no part's traffic
hide behind another part's arithmetic, and counts activations in the caches, too: what is above it was won by fetching
ahead. `cycle`: with the host's work between two steps, and the share attainable of it.
--parts adds where the time goes: each part's attainable milliseconds (in turn) beside those of the runner's own phases.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from lab.offline import Bench
from lab.peers.point import Point as Workload

from inferloop.core.hardware import OpKind
from inferloop.core.step_cost import StepCost, StepLoad, WeightBytes, step_cost
from inferloop.core.units import MIB
from inferloop.engine.compute.native import _native
from inferloop.engine.compute.native.config import Isa, KvFormat, NativeConfig, Weights
from inferloop.engine.compute.native.hardware import measure
from inferloop.engine.compute.native.memory import BLOCK_SIZE
from inferloop.engine.compute.native.pack import pack_model
from inferloop.engine.compute.native.packed import GROUP, PackedMatrix
from inferloop.engine.compute.native.runner import NativeRunner
from inferloop.engine.compute.native.weigh import multiplied_in, weight_bytes
from inferloop.engine.compute.runner import GiveUp, RunnerInfo, never
from inferloop.engine.config import EngineConfig
from inferloop.engine.schedule.step import StepPlan, StepResult
from inferloop.models.digests import weights_digest
from inferloop.models.headers import ModelHeader
from inferloop.models.resolve import resolve
from inferloop.plan.roofline import Attainable, Roofs, attainable

SMALL_SETS = (2 * MIB, 16 * MIB, 32 * MIB)
"""For activations."""
PHASES = {
    "qkv": ("norm", "qkv"),  # both norms of a layer
    "attention": ("attention",),
    "out": ("encode", "out"),
    "gate_up": ("route", "gate_up"),
    "down": ("down",),
    "head": ("head", "sample"),
    "embedding": ("move", "embed"),
}
"""Part of a step's cost -> the runner's phases that it is spent in."""


def dots_share(matrices: Mapping[str, PackedMatrix], kind: str) -> float:
    """How much of the peak of products the matrices of a kind ("qkv", ..., "embed") leave: of the instructions that
    need a multiplier, those that are products. For every 32 inputs of a tile 8 are; each scale takes a multiplication
    by that of the activations and one that is added to the sum, a min one more. Of 512-bit VNNI only: AMX has
    multipliers of its own."""
    weights, spent = 0, 0.0
    for name, matrix in matrices.items():
        if name.rpartition(".")[2] == kind:
            others = GROUP // matrix.group * (2 + matrix.has_min) if matrix.format == "group" else 0
            weights += matrix.n * matrix.k
            spent += matrix.n * matrix.k * (8 + others) / 8
    return weights / spent


@dataclass(frozen=True, slots=True)
class Step:
    load: StepLoad
    seconds: float
    cycle_s: float
    """From the end of the step before it to the end of this one."""
    phases: Mapping[str, int]
    """Ticks of the first thread, waiting included."""
    ticks: int


class TimedRunner:
    """The runner, with a watch."""

    def __init__(self, inner: NativeRunner) -> None:
        self._inner = inner
        self.steps: list[Step] = []
        self._load, self._begun, self._ended, self._ticks = StepLoad((), (), 0), 0, 0, 0

    @property
    def info(self) -> RunnerInfo:
        return self._inner.info

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        new, past = np.diff(plan.offsets).tolist(), plan.first_positions.tolist()
        self._load = StepLoad(tuple(new), tuple(past), int((plan.sample_rows >= 0).sum()))
        self._begun, self._ticks = time.perf_counter_ns(), _native.ticks()
        self._inner.submit(plan, give_up)

    def wait(self) -> StepResult:
        result = self._inner.wait()
        before, self._ended = self._ended, time.perf_counter_ns()
        ticks = _native.ticks() - self._ticks
        phases = {name: sum(threads[0]) for name, threads in self._inner.profile().items()}
        seconds, cycle_s = (self._ended - self._begun) / 1e9, (self._ended - before) / 1e9
        self.steps.append(Step(self._load, seconds, cycle_s, phases, ticks))
        return result


@dataclass(frozen=True, slots=True)
class Model:
    """What its steps cost."""

    header: ModelHeader
    weights: WeightBytes
    products: OpKind
    kv_bytes_per_token: float
    attention: OpKind
    dots: Mapping[str, float]
    """Part -> dots_share; 1 for a part that is not there."""

    def cost(self, load: StepLoad) -> StepCost:
        windows = self.header.structure.windows or (None,)
        return step_cost(self.header.shape, load, self.weights, self.kv_bytes_per_token, windows=windows)

    def attainable(self, load: StepLoad, roofs: Roofs) -> Attainable:
        return attainable(self.cost(load), roofs, products=self.products, attention=self.attention)

    def of_format_s(self, best: Attainable) -> float:
        """Of all operations, scales included."""
        return math.fsum(part.compute_s / self.dots.get(part.name, 1.0) for part in best.parts)

    def in_turn_s(self, best: Attainable) -> float:
        return math.fsum(max(p.memory_s, p.compute_s / self.dots.get(p.name, 1.0)) for p in best.parts)


class Point(Workload):
    """What is measured, and which steps it is about."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return f"prefill {self.prompt}" if self.output == 1 else f"decode x{self.streams}"

    @property
    def typical(self) -> StepLoad:
        if self.output == 1:
            return StepLoad.prefill(self.prompt)
        return StepLoad.decode(self.streams, self.prompt + self.output // 2)

    def is_of(self, load: StepLoad) -> bool:
        """Computing its prompt, or a token for every stream: not the first few of a decode, while streams join."""
        return self.output == 1 or load.new == (1,) * self.streams


@dataclass(frozen=True, slots=True)
class Row:
    """Of a point in one round: the median step that decodes, or the steps of a prompt together, however it was cut.
    Times in ms."""

    num_bytes: float
    ops: float
    bytes_per_s: float
    memory: float
    compute: float
    of_format: float
    in_turn: float
    measured: float
    cycle: float
    """From the end of one step to that of the next; 0 for prompts, which have no such step."""
    parts: Mapping[str, tuple[float, float, str]]
    """Attainable, measured, bound."""

    @property
    def roof_share(self) -> float:
        return max(self.memory, self.compute) / self.measured

    @property
    def share(self) -> float:
        return max(self.memory, self.of_format) / self.measured

    @property
    def in_turn_share(self) -> float:
        return self.in_turn / self.measured

    @property
    def cycle_share(self) -> float:
        return max(self.memory, self.of_format) / self.cycle if self.cycle else 0.0


def row_of(point: Point, steps: Sequence[Step], model: Model, roofs: Roofs) -> Row:
    costs = [model.cost(step.load) for step in steps]
    best = [model.attainable(step.load, roofs) for step in steps]
    together: Callable[[Iterable[float]], float] = sum if point.output == 1 else statistics.median
    parts: dict[str, tuple[float, float, str]] = {}
    for name, phases in PHASES.items():
        each = [next(part for part in one.parts if part.name == name) for one in best]
        spent = [step.seconds * sum(step.phases[phase] for phase in phases) / step.ticks for step in steps]
        dots = model.dots.get(name, 1.0)
        attained = together(max(p.memory_s, p.compute_s / dots) for p in each)
        parts[name] = (attained * 1e3, together(spent) * 1e3, each[0].bound)
    return Row(
        num_bytes=together(cost.memory_bytes for cost in costs),
        ops=together(cost.ops for cost in costs),
        bytes_per_s=statistics.median(roofs.read.at(cost.memory_bytes) for cost in costs),
        memory=together(cost.memory_bytes / roofs.read.at(cost.memory_bytes) for cost in costs) * 1e3,
        compute=together(math.fsum(part.compute_s for part in one.parts) for one in best) * 1e3,
        of_format=together(map(model.of_format_s, best)) * 1e3,
        in_turn=together(map(model.in_turn_s, best)) * 1e3,
        measured=together(step.seconds for step in steps) * 1e3,
        cycle=0.0 if point.output == 1 else together(step.cycle_s for step in steps[1:]) * 1e3,
        parts=parts,
    )


def shares_of(matrices: Mapping[str, PackedMatrix]) -> dict[str, float]:
    kinds = {part: part for part in ("qkv", "out", "gate_up", "down")} | {
        "head": "head" if "head" in matrices else "embed"
    }
    return {part: dots_share(matrices, kind) for part, kind in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--weights", default="stored", choices=get_args(Weights))
    parser.add_argument("--kv", default="bf16", choices=get_args(KvFormat))
    parser.add_argument("--isa", default=None, choices=get_args(Isa))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens of the decode runs")
    parser.add_argument("--output", type=int, default=128, help="tokens generated per sequence")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--budget", type=int, default=512, help="tokens per step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure-s", type=float, default=1.0, help="seconds of measuring the machine in each round")
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()

    files = resolve(options.model)
    points = [Point(streams, options.prompt, options.output) for streams in options.batch]
    points += [Point(1, num, 1) for num in options.prefill]
    num_blocks = max(p.streams * (-(-(p.prompt + p.output) // BLOCK_SIZE) + 1) for p in points)
    config = NativeConfig(options.weights, options.kv, options.threads, num_blocks, isa=options.isa)
    packed = pack_model(files.header, config.weights, digest=weights_digest(files))
    runner = NativeRunner(files.header, packed, config)
    model = Model(
        files.header,
        weight_bytes(
            packed.matrices,
            {name: len(vector) for name, vector in packed.vectors.items()},
            files.header.shape.experts,
        ),
        multiplied_in(packed.matrices),
        runner.info.block_bytes / BLOCK_SIZE,
        "int8" if options.kv == "int8" else "bf16",
        shares_of(packed.matrices) if "+avx512" in runner.info.revision else {},
    )
    timed = TimedRunner(runner)
    bench = Bench(timed, EngineConfig(max_step_tokens=options.budget, max_sequences=max(p.streams for p in points)))
    rng = random.Random(0)
    sizes = [*SMALL_SETS, *(int(model.cost(point.typical).memory_bytes) for point in points)]
    rows: dict[str, list[Row]] = {point.name: [] for point in points}
    others = []
    for round_number in range(-1, options.rounds):  # round -1 warms up
        measured = measure(sizes, options.measure_s if round_number >= 0 else 0.0, threads=[options.threads])
        roofs = Roofs.measured(measured, options.threads)
        for point in points:
            timed.steps.clear()
            prompts = point.prompts(runner.info.vocab_size, rng.getrandbits(32))
            bench.run(prompts, point.output).check(point)
            steps = [step for step in timed.steps if point.is_of(step.load)]
            if round_number >= 0:
                rows[point.name].append(row_of(point, steps, model, roofs))
                others.append(measured.others_share)
    bench.engine.stop()
    report(rows, options.parts)
    peaks = ", ".join(f"{kind} {ops / 1e9:.0f}" for kind, ops in roofs.ops_per_s.items())
    print(
        f"\nlast round, {options.threads} threads, Gop/s: {peaks}; others had up to {max(others):.0%} of the processors"
    )
    print(runner.info.dtype, runner.info.revision)
    middle = {
        name: {c: round(_median(found, c), 3) for c in ("measured", "share", "roof_share")}
        for name, found in rows.items()
    }
    print(json.dumps(middle))


def report(rows: Mapping[str, Sequence[Row]], parts: bool) -> None:
    columns = ("MB", "Gop", "GB/s", "memory", "compute", "of format", "measured", "roof", "attainable", "in turn")
    print(f"{'ms':12}" + "".join(f"{name:>11}" for name in (*columns, "cycle", "attainable")))
    for name, found in rows.items():
        cells = (
            f"{_median(found, 'num_bytes') / 1e6:.1f}",
            f"{_median(found, 'ops') / 1e9:.2f}",
            f"{_median(found, 'bytes_per_s') / 1e9:.1f}",
            *(f"{_median(found, column):.2f}" for column in ("memory", "compute", "of_format", "measured")),
            *(f"{_median(found, column):.1%}" for column in ("roof_share", "share", "in_turn_share")),
            f"{_median(found, 'cycle'):.2f}" if found[0].cycle else "",
            f"{_median(found, 'cycle_share'):.1%}" if found[0].cycle else "",
        )
        print(f"{name:12}" + "".join(f"{cell:>11}" for cell in cells))
    for name, found in rows.items() if parts else ():
        print(f"\n{name:12}{'attainable':>12}{'measured':>12}   bound")
        for part in PHASES:
            best = statistics.median(row.parts[part][0] for row in found)
            spent = statistics.median(row.parts[part][1] for row in found)
            print(f"  {part:10}{best:12.3f}{spent:12.3f}   {found[0].parts[part][2]}")


def _median(rows: Sequence[Row], column: str) -> float:
    return statistics.median(float(getattr(row, column)) for row in rows)


if __name__ == "__main__":
    main()

"""What a step could take at best on a machine: bytes over bandwidth, operations over peak (Williams et al. 2009).

A step is a chain of parts: each needs what the one before it gives. A part alone takes the longer of moving its bytes
and doing its operations; the parts in turn take the sum of that, and this is what `share` compares with. Who fetches
the next part's weights while this one computes can do better, down to `overlapped_s`, where only the totals count and
which nobody passes. For one stream the two are equal, because everything waits for memory.

Weights and KV are read at the bandwidth of a working set as large as all of them: that much passes through the caches
before the same byte is wanted again. Activations are read at that of one layer's. Written bytes count like read ones.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from inferloop.core.errors import EnvironmentLacksError, UsageError
from inferloop.core.hardware import MeasuredHardware, OpKind
from inferloop.core.step_cost import PartCost, PartName, StepCost


@dataclass(frozen=True, slots=True)
class BandwidthCurve:
    """(working set in bytes, bytes per second), sizes ascending. Raises UsageError when it is not that."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        rising = all(a < b for a, b in itertools.pairwise(sizes))
        if not self.points or not rising or min(min(point) for point in self.points) <= 0:
            raise UsageError("a bandwidth curve needs sizes that rise from above 0, and bandwidths above 0")

    def at(self, working_set_bytes: float) -> float:
        """Between two sizes the time of one pass is interpolated, not the bandwidth: what a cache keeps is read at one
        speed, the rest at another, so the time is a straight line. Beyond the ends the bandwidth stays."""
        sizes = [size for size, _ in self.points]
        i = bisect.bisect_left(sizes, working_set_bytes)
        if i == 0 or i == len(sizes):
            return self.points[min(i, len(sizes) - 1)][1]
        (small, fast), (large, slow) = self.points[i - 1], self.points[i]
        weight = (working_set_bytes - small) / (large - small)
        return working_set_bytes / ((1 - weight) * small / fast + weight * large / slow)


@dataclass(frozen=True, slots=True)
class Roofs:
    """Of one machine with a fixed number of threads."""

    read: BandwidthCurve
    ops_per_s: Mapping[OpKind, float]

    @classmethod
    def measured(cls, found: MeasuredHardware, num_threads: int) -> Roofs:
        """The best instruction set for each kind. Raises EnvironmentLacksError when peaks were not measured, UsageError
        for a number of threads that was not."""
        if not found.peaks:
            raise EnvironmentLacksError(
                "peaks of multiplication are measured by the native extension, which is missing",
                fix="Install inferloop where a C++20 compiler is found.",
            )
        points = tuple((b.working_set_bytes, b.bytes_per_s) for b in found.bandwidth if b.num_threads == num_threads)
        peaks: dict[OpKind, float] = {}
        for peak in found.peaks:
            if peak.num_threads == num_threads:
                peaks[peak.kind] = max(peak.ops_per_s, peaks.get(peak.kind, 0.0))
        if not points or not peaks:
            raise UsageError(f"nothing was measured with {num_threads} threads")
        return cls(BandwidthCurve(tuple(sorted(points))), peaks)

    def peak(self, kind: OpKind) -> float:
        """Operations per second; a kind that the machine has no instruction for is computed in fp32."""
        return max(self.ops_per_s.get(kind, 0.0), self.ops_per_s["fp32"])


@dataclass(frozen=True, slots=True)
class PartTime:
    name: PartName
    num_bytes: float
    ops: float
    bytes_per_s: float
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_s >= self.compute_s else "compute"


@dataclass(frozen=True, slots=True)
class Attainable:
    parts: tuple[PartTime, ...]

    @property
    def in_turn_s(self) -> float:
        """Each part as fast as memory and arithmetic let it, one after the other."""
        return math.fsum(part.seconds for part in self.parts)

    @property
    def overlapped_s(self) -> float:
        """All bytes moved without a pause while all operations are done without a pause: nobody is faster."""
        memory = math.fsum(part.memory_s for part in self.parts)
        return max(memory, math.fsum(part.compute_s for part in self.parts))

    def share(self, measured_s: float) -> float:
        """How much of the attainable a measured step reached; 1 is all of it."""
        return self.in_turn_s / measured_s


def attainable(cost: StepCost, roofs: Roofs, *, products: OpKind, attention: OpKind) -> Attainable:
    """`products`, `attention`: what the two multiply in."""
    return Attainable(tuple(_part(p, roofs, attention if p.name == "attention" else products) for p in cost))


def _part(part: PartCost, roofs: Roofs, kind: OpKind) -> PartTime:
    bytes_per_s = roofs.read.at(part.reused_after_bytes)
    return PartTime(
        part.name,
        part.num_bytes,
        part.ops,
        bytes_per_s,
        memory_s=part.num_bytes / bytes_per_s,
        compute_s=part.ops / roofs.peak(kind),
    )

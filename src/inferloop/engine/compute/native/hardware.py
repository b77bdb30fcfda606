"""How fast this machine reads memory and multiplies, measured now.

Samples of all sizes, instruction sets and thread counts take turns, so that a slow second of the machine hits all
alike; medians are what counts. Measuring ends when its time is up, but not before everything has some samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import psutil

from inferloop.core.clock import Clock, RealClock
from inferloop.core.cores import usable_cores
from inferloop.core.errors import EnvironmentLacksError
from inferloop.core.hardware import Bandwidth, MeasuredHardware, Peak
from inferloop.core.units import MIB, NS_PER_S
from inferloop.engine.compute.native.arena import NumpyArena, huge_page_bytes
from inferloop.engine.compute.native.extension import load_extension

WORKING_SETS = tuple(size * MIB for size in (2, 16, 28, 64, 96, 136, 192, 276, 512))
"""From a core's own cache to far beyond all of them; between, what steps of small models with few and many streams
read."""
QUICK_SETS = tuple(size * MIB for size in (2, 28, 96, 276))
BUDGET_S, QUICK_BUDGET_S = 6.0, 0.8
"""Of taking samples; a second or less of preparation comes on top."""
_SHARE_FOR_READING = 0.8
_MIN_SAMPLES = 3
_SAMPLE_S = 0.004
"""Long against the clock and the start of threads, short enough to fall between other processes now and then."""
_SHARE_OF_MEMORY = 0.25

Key = TypeVar("Key", bound=Hashable)
Sample = Callable[[], float]


def measure(
    working_sets: Sequence[int] = WORKING_SETS,
    budget_s: float = BUDGET_S,
    *,
    threads: Sequence[int] | None = None,
    clock: Clock | None = None,
) -> MeasuredHardware:
    """Reading of every one of `working_sets` (bytes) that is at most a quarter of the free memory, the smallest always,
    and multiplying. `threads` None: one, and one for every core that this process may use. Without the native extension
    reading is measured with numpy, multiplying not at all."""
    clock = clock or RealClock()
    others = _Others()
    native = _extension()
    best_isa = None if native is None else _best_isa()
    threads = sorted({1, usable_cores()} if threads is None else threads)
    sizes = _sizes(working_sets, psutil.virtual_memory().available)

    arena: _Arena = NumpyArena(sizes[-1]) if native is None else _NativeArena(native, sizes[-1], threads)
    reads = {(size, n): _reading(arena, size, n) for n in threads for size in sizes}
    read = _take_turns(reads, budget_s * _SHARE_FOR_READING, clock)
    in_huge_pages = huge_page_bytes(arena.address, arena.num_bytes)
    del arena, reads
    products = {} if native is None else _multiplying(native, threads)
    multiplied = _take_turns(products, budget_s * (1 - _SHARE_FOR_READING), clock)
    return MeasuredHardware(
        method="numpy" if native is None else "native",
        best_isa=best_isa,
        num_samples=min(map(len, [*read.values(), *multiplied.values()])),
        memory_bytes=sizes[-1],
        huge_page_bytes=in_huge_pages,
        others_share=others.share(),
        bandwidth=tuple(Bandwidth(size, n, statistics.median(rates), max(rates)) for (size, n), rates in read.items()),
        peaks=tuple(
            Peak(kind, isa, n, statistics.median(rates), max(rates)) for (isa, kind, n), rates in multiplied.items()
        ),
    )


def _extension() -> Any | None:
    try:
        return load_extension()
    except EnvironmentLacksError:
        return None


def _best_isa() -> str:
    from inferloop.engine.compute.native.level import best_isa  # only with the extension

    return best_isa()


def _sizes(wanted: Sequence[int], free_bytes: int) -> list[int]:
    """Ascending."""
    smallest, *larger = sorted(set(wanted))
    return [smallest, *(size for size in larger if size <= free_bytes * _SHARE_OF_MEMORY)]


class _Others:
    """Processor time that this process did not get, from now on."""

    def __init__(self) -> None:
        self._begin = self._times()

    def share(self) -> float:
        """Of all processors' time, since the beginning."""
        (total, busy, own), (total_before, busy_before, own_before) = self._times(), self._begin
        theirs = busy - busy_before - (own - own_before)
        return min(1.0, max(0.0, theirs / max(total - total_before, 1e-9)))

    @staticmethod
    def _times() -> tuple[float, float, float]:
        every, own = psutil.cpu_times(), psutil.Process().cpu_times()
        guests = getattr(every, "guest", 0.0) + getattr(every, "guest_nice", 0.0)  # counted as user, too
        total = sum(every) - guests
        return total, total - every.idle - getattr(every, "iowait", 0.0), own.user + own.system


class _Arena(Protocol):
    """Memory that was written once. `seconds`: reading its first `num_bytes` `num_passes` times."""

    num_bytes: int
    address: int

    def seconds(self, num_bytes: int, num_threads: int, num_passes: int) -> float: ...


class _NativeArena:
    def __init__(self, native: Any, num_bytes: int, threads: Sequence[int]) -> None:
        self._hardware = native.hardware
        self._arena = self._hardware.Arena(num_bytes)
        self._threads = {n: self._hardware.Threads(n) for n in threads}
        self.num_bytes, self.address = num_bytes, self._arena.address

    def seconds(self, num_bytes: int, num_threads: int, num_passes: int) -> float:
        found: float = self._hardware.read_seconds(self._threads[num_threads], self._arena, num_bytes, num_passes)
        return found


def _reading(arena: _Arena, num_bytes: int, num_threads: int) -> Sample:
    """Bytes per second of a sample. Its first pass is not timed: before it another size was read."""
    num_passes = math.ceil(_SAMPLE_S / arena.seconds(num_bytes, num_threads, 1))

    def sample() -> float:
        arena.seconds(num_bytes, num_threads, 1)
        return num_bytes * num_passes / arena.seconds(num_bytes, num_threads, num_passes)

    return sample


def _multiplying(native: Any, threads: Sequence[int]) -> dict[tuple[Any, Any, int], Sample]:
    """(isa, kind, threads) -> operations per second of a sample."""
    hardware = native.hardware
    pools = {n: hardware.Threads(n) for n in threads}

    def samples(isa: str, kind: str, num_threads: int) -> Sample:
        trial = 10_000
        num_rounds = math.ceil(trial * _SAMPLE_S / hardware.multiply_seconds(pools[num_threads], isa, kind, trial))
        ops = hardware.ops_per_round(isa, kind) * num_rounds * num_threads
        return lambda: ops / hardware.multiply_seconds(pools[num_threads], isa, kind, num_rounds)

    return {(isa, kind, n): samples(isa, kind, n) for n in threads for isa, kind in hardware.multipliers()}


def _take_turns(samples: Mapping[Key, Sample], budget_s: float, clock: Clock) -> dict[Key, list[float]]:
    found: dict[Key, list[float]] = {key: [] for key in samples}
    deadline = clock.now_ns() + budget_s * NS_PER_S
    rounds = 0
    while samples and (rounds < _MIN_SAMPLES or clock.now_ns() < deadline):
        for key, sample in samples.items():
            found[key].append(sample())
        rounds += 1
    return found

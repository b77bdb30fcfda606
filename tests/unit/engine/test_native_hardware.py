"""What is measured of the machine: that it is really done, never how fast it is."""

from __future__ import annotations

import subprocess
import sys

import pytest

_native = pytest.importorskip("inferloop.engine.compute.native._native")
hardware = _native.hardware
MIB = 1 << 20
KINDS = [tuple(each) for each in hardware.multipliers()]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> object:
    return hardware.Threads(request.param)


@pytest.mark.parametrize(("isa", "kind"), KINDS)
def test_no_operation_is_left_out(threads: object, isa: str, kind: str) -> None:
    """A busy machine may take any time; less than a core of 100 TOP/s would need means that it was not done."""
    ops = hardware.ops_per_round(isa, kind) * 200_000
    assert ops > 0
    assert hardware.multiply_seconds(threads, isa, kind, 200_000) > ops / 1e14


def test_every_level_has_its_own_kinds_only() -> None:
    assert ("scalar", "fp32") in KINDS
    assert not {("scalar", "int8"), ("avx2", "bf16"), ("avx512_bf16", "fp32")} & set(KINDS)
    with pytest.raises(ValueError, match="no such instruction"):
        hardware.ops_per_round("scalar", "int8")
    with pytest.raises(ValueError, match="not a level of this machine"):
        hardware.ops_per_round("avx1024", "int8")


def test_no_byte_is_left_out(threads: object) -> None:
    arena = hardware.Arena(8 * MIB)
    assert hardware.read_seconds(threads, arena, 8 * MIB, 20) > 20 * 8 * MIB / 1e13


@pytest.mark.parametrize("num_bytes", [0, 511, 512, 3 * 512 + 7, MIB])
def test_any_size_can_be_read_and_none_beyond_the_end(threads: object, num_bytes: int) -> None:
    arena = hardware.Arena(MIB)
    assert hardware.read_seconds(threads, arena, num_bytes, 3) >= 0
    assert hardware.read_seconds(threads, arena, 64 * MIB, 1) >= 0
    assert arena.address % (2 * MIB) == 0


def test_memory_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(MemoryError):
        hardware.Arena(1 << 62)


def test_threads_that_cannot_be_had_are_an_error_and_those_begun_end() -> None:
    """In a process of its own, which has little room for their stacks."""
    program = """
import resource
from inferloop.engine.compute.native import _native
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), -1))
try:
    _native.hardware.Threads(100)
except RuntimeError as problem:
    print("refused", problem)
print(_native.hardware.multiply_seconds(_native.hardware.Threads(2), "scalar", "fp32", 100) > 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused")
    assert done.stdout.endswith("True\n")

"""What is measured of the machine: that it is really done, never how fast it is."""

from __future__ import annotations

import pytest

_native = pytest.importorskip("inferloop.engine.compute.native._native")
hardware = _native.hardware
MIB = 1 << 20
KINDS = [tuple(each) for each in hardware.multipliers()]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> object:
    return hardware.Threads(request.param)


@pytest.mark.parametrize(("isa", "kind"), KINDS)
def test_twenty_times_the_rounds_take_longer(threads: object, isa: str, kind: str) -> None:
    few = min(hardware.multiply_seconds(threads, isa, kind, 10_000) for _ in range(5))
    many = min(hardware.multiply_seconds(threads, isa, kind, 200_000) for _ in range(5))
    assert 0 < few < many
    assert hardware.ops_per_round(isa, kind) > 0


def test_every_level_has_its_own_kinds_only() -> None:
    assert ("scalar", "fp32") in KINDS
    assert not {("scalar", "int8"), ("avx2", "bf16"), ("avx512_bf16", "fp32")} & set(KINDS)
    with pytest.raises(ValueError, match="no such instruction"):
        hardware.ops_per_round("scalar", "int8")
    with pytest.raises(ValueError, match="not a level of this machine"):
        hardware.ops_per_round("avx1024", "int8")


def test_more_passes_over_memory_take_longer(threads: object) -> None:
    arena = hardware.Arena(8 * MIB)
    one = min(hardware.read_seconds(threads, arena, 8 * MIB, 1) for _ in range(5))
    many = min(hardware.read_seconds(threads, arena, 8 * MIB, 20) for _ in range(5))
    assert 0 < one < many


@pytest.mark.parametrize("num_bytes", [0, 511, 512, 3 * 512 + 7, MIB])
def test_any_size_can_be_read_and_none_beyond_the_end(threads: object, num_bytes: int) -> None:
    arena = hardware.Arena(MIB)
    assert hardware.read_seconds(threads, arena, num_bytes, 3) >= 0
    assert hardware.read_seconds(threads, arena, 64 * MIB, 1) >= 0
    assert arena.address % (2 * MIB) == 0


def test_memory_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(MemoryError):
        hardware.Arena(1 << 62)

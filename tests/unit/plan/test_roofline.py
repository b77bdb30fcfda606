"""The roofline by hand, and what must hold for every curve and every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.core.errors import EnvironmentLacksError, UsageError
from inferloop.core.hardware import Bandwidth, MeasuredHardware, Peak
from inferloop.core.shape import ModelShape
from inferloop.core.step_cost import StepLoad, WeightBytes, step_cost
from inferloop.core.units import MIB
from inferloop.plan.roofline import Attainable, BandwidthCurve, Roofs, attainable

SMOLLM2 = ModelShape("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_embeddings=True)
STORED = WeightBytes.in_format(SMOLLM2, "q4_1", "q8_0")
FLAT = Roofs(BandwidthCurve(((MIB, 50e9),)), {"int8": 2e12, "bf16": 1e12, "fp32": 5e11})


def decode(num_streams: int, past: int, roofs: Roofs = FLAT) -> Attainable:
    cost = step_cost(SMOLLM2, StepLoad.decode(num_streams, past), STORED)
    return attainable(cost, roofs, products="int8", attention="bf16")


def part(found: Attainable, name: str) -> tuple[float, float]:
    return next((p.memory_s, p.compute_s) for p in found.parts if p.name == name)


def test_one_stream_waits_for_memory_everywhere() -> None:
    found = decode(1, 319)
    moved = 96_436_224 + 612 + 140_544 + 320 * 23_040 + 30 * 8448 * 4  # matrices, embedding, gains, KV, activations
    assert {p.bound for p in found.parts} == {"memory"}
    assert found.in_turn_s == pytest.approx(moved / 50e9, rel=1e-12)
    assert found.overlapped_s == pytest.approx(found.in_turn_s, rel=1e-12)
    assert found.share(moved / 50e9 * 2) == pytest.approx(0.5)


def test_many_streams_compute_in_the_layers_and_read_in_attention() -> None:
    found = decode(32, 320)
    assert part(found, "gate_up") == (33_177_600 / 50e9, 2 * 30 * 576 * 3072 * 32 / 2e12)
    assert part(found, "attention") == ((320 + 1) * 32 * 23_040 / 50e9, 4 * 30 * 9 * 64 * 321 * 32 / 1e12)
    by_name = {p.name: p.bound for p in found.parts}
    assert by_name["gate_up"] == "compute"
    assert by_name["attention"] == "memory"
    assert found.in_turn_s > found.overlapped_s


def test_weights_are_read_at_the_speed_of_all_that_a_step_moves_activations_of_a_layer() -> None:
    curve = BandwidthCurve(((2 * MIB, 300e9), (64 * MIB, 60e9), (256 * MIB, 50e9)))
    found = decode(1, 0, replace(FLAT, read=curve))
    speeds = {p.name: p.bytes_per_s for p in found.parts}
    assert speeds["qkv"] == speeds["head"] == speeds["attention"] == curve.at(96_436_224 + 612 + 140_544 + 23_040)
    assert speeds["activations"] == 300e9


def test_between_two_sizes_the_time_of_a_pass_is_a_straight_line() -> None:
    curve = BandwidthCurve(((100, 100.0), (300, 50.0)))  # passes of 1 s and 6 s
    assert curve.at(200) == pytest.approx(200 / 3.5)
    assert (curve.at(100), curve.at(300)) == (100.0, 50.0)
    assert (curve.at(1), curve.at(1e9)) == (100.0, 50.0)


def test_a_kind_without_an_instruction_is_computed_in_fp32() -> None:
    assert replace(FLAT, ops_per_s={"fp32": 5e11, "int8": 1e11}).peak("bf16") == 5e11
    assert replace(FLAT, ops_per_s={"fp32": 5e11, "int8": 1e11}).peak("int8") == 5e11


MEASURED = MeasuredHardware(
    "native",
    "avx512",
    3,
    64 * MIB,
    None,
    0.0,
    (Bandwidth(64 * MIB, 2, 60e9, 61e9), Bandwidth(2 * MIB, 2, 300e9, 310e9), Bandwidth(2 * MIB, 1, 150e9, 151e9)),
    (
        Peak("fp32", "scalar", 2, 1e11, 1e11),
        Peak("fp32", "avx512", 2, 5e11, 5e11),
        Peak("int8", "avx512", 2, 2e12, 2e12),
    ),
)


def test_roofs_are_the_best_level_of_the_threads_asked_for() -> None:
    roofs = Roofs.measured(MEASURED, 2)
    assert list(roofs.read.points) == [(2 * MIB, 300e9), (64 * MIB, 60e9)]
    assert roofs.ops_per_s == {"fp32": 5e11, "int8": 2e12}


def test_what_was_not_measured_is_no_roof() -> None:
    with pytest.raises(UsageError, match="3 threads"):
        Roofs.measured(MEASURED, 3)
    with pytest.raises(EnvironmentLacksError, match="native extension"):
        Roofs.measured(replace(MEASURED, method="numpy", peaks=()), 2)


@pytest.mark.parametrize("points", [(), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((0, 1.0),), ((1, 0.0),)])
def test_a_curve_that_is_none_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(UsageError):
        BandwidthCurve(points)


speeds = st.floats(1e9, 1e12)
sizes = st.lists(st.integers(MIB, 512 * MIB), min_size=1, max_size=6, unique=True).map(sorted)


@st.composite
def curves(draw: st.DrawFn) -> BandwidthCurve:
    """As of a real machine: more memory is never read faster."""
    found = draw(sizes)
    fast = sorted((draw(speeds) for _ in found), reverse=True)
    return BandwidthCurve(tuple(zip(map(float, found), fast, strict=True)))


@given(curves(), st.lists(st.floats(1.0, 1e10), min_size=2, max_size=2).map(sorted))
def test_larger_sets_are_slower_and_never_outside_the_measured(curve: BandwidthCurve, asked: list[float]) -> None:
    small, large = map(curve.at, asked)
    assert large <= small * (1 + 1e-9)
    lowest, highest = curve.points[-1][1], curve.points[0][1]
    assert lowest * (1 - 1e-9) <= large <= small * (1 + 1e-9) <= highest * (1 + 1e-8)


@given(curves(), st.integers(1, 40), st.integers(0, 600), st.integers(1, 8), st.integers(0, 300))
def test_more_streams_or_longer_ones_never_take_less(
    curve: BandwidthCurve, streams: int, past: int, more: int, longer: int
) -> None:
    roofs = replace(FLAT, read=curve)
    less, after = decode(streams, past, roofs), decode(streams + more, past + longer, roofs)
    assert after.in_turn_s >= less.in_turn_s
    assert after.overlapped_s >= less.overlapped_s


@given(curves(), st.integers(1, 40), st.integers(0, 600))
def test_overlap_saves_at_most_half(curve: BandwidthCurve, streams: int, past: int) -> None:
    found = decode(streams, past, replace(FLAT, read=curve))
    assert found.overlapped_s <= found.in_turn_s * (1 + 1e-12)
    assert found.in_turn_s <= 2 * found.overlapped_s

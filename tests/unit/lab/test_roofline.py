"""The share of the roofline that lab/roofline prints, by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("inferloop.engine.compute.native._native")

from lab.roofline import Model, Point, Step, dots_share, row_of

from inferloop.core.step_cost import StepLoad, WeightBytes
from inferloop.core.units import MIB
from inferloop.engine.compute.native.packed import PackedMatrix
from inferloop.models.resolve import ModelFiles
from inferloop.plan.roofline import BandwidthCurve, Roofs

ROOFS = Roofs(BandwidthCurve(((MIB, 50e9),)), {"int8": 2e12, "bf16": 1e12, "fp32": 5e11})
DOTS = {"qkv": 8 / 11, "out": 8 / 11, "gate_up": 8 / 11, "down": 8 / 11, "head": 0.8}
NOTHING = dict.fromkeys(
    ("move", "embed", "norm", "qkv", "attention", "encode", "out", "route", "gate_up", "down", "head", "sample"), 0
)


@pytest.fixture
def model(embedded_model: ModelFiles) -> Model:
    header = embedded_model.header
    return Model(header, WeightBytes.in_format(header.shape, "q4_1", "q8_0"), "int8", 23_040, "bf16", DOTS)


def test_a_decode_is_its_median_step(model: Model) -> None:
    point = Point(streams=1, prompt=16, output=3)
    phases = {**NOTHING, "norm": 100, "qkv": 150, "sample": 500}
    steps = [Step(StepLoad.decode(1, past), 0.004, cycle, phases, 1000) for past, cycle in ((16, 9.0), (18, 0.005))]
    row = row_of(point, steps, model, ROOFS)
    moved = 96_436_224 + 612 + 140_544 + 23_040 * (17 + 1)
    assert row.num_bytes == moved
    assert row.bytes_per_s == 50e9
    assert row.memory == pytest.approx(moved / 50e9 * 1e3)
    assert row.in_turn == pytest.approx((moved + 30 * 8448 * 4) / 50e9 * 1e3)
    layers, head, scores = 106_168_320, 49152 * 576, 2 * 30 * 9 * 64 * 18
    assert row.compute == pytest.approx(2 * ((layers + head) / 2e12 + scores / 1e12) * 1e3)
    assert row.of_format == pytest.approx(2 * ((layers * 11 / 8 + head * 10 / 8) / 2e12 + scores / 1e12) * 1e3)
    assert row.measured == pytest.approx(4.0)
    assert row.cycle == pytest.approx(5.0)  # the first one began elsewhere
    assert row.share == row.roof_share == pytest.approx(row.memory / 4)  # memory bounds it, whatever scales cost
    assert row.cycle_share == pytest.approx(row.memory / 5)
    best, spent, bound = row.parts["qkv"]
    assert best == pytest.approx(10_368_000 / 50e9 * 1e3)
    assert spent == pytest.approx(1.0)  # a quarter of the ticks
    assert bound == "memory"
    assert row.parts["head"][1] == pytest.approx(2.0)


def test_a_prompt_is_the_sum_of_its_steps(model: Model) -> None:
    point = Point(streams=1, prompt=512, output=1)
    steps = [Step(StepLoad((256,), (past,), num), 0.03, 0.03, NOTHING, 1000) for past, num in ((0, 0), (256, 1))]
    row = row_of(point, steps, model, ROOFS)
    assert row.measured == pytest.approx(60.0)
    whole = row_of(point, [Step(StepLoad.prefill(512), 0.06, 0.06, NOTHING, 1000)], model, ROOFS)
    assert row.ops == whole.ops
    assert row.roof_share == pytest.approx(row.compute / 60)  # arithmetic bounds it
    assert row.share == pytest.approx(row.of_format / 60)
    assert row.compute * 10 / 8 < row.of_format < row.compute * 11 / 8
    assert row.num_bytes > whole.num_bytes  # weights and the first half are read twice


def test_scales_and_mins_take_their_share_of_the_multipliers() -> None:
    plain = PackedMatrix("group", 32, 64, 0, 1)
    mins = PackedMatrix("group", 32, 64, 0, 1, has_min=True)
    halves = PackedMatrix("group", 32, 64, 0, 1, group=16, has_min=True)
    assert dots_share({"embed": plain}, "embed") == 0.8
    assert dots_share({"embed": plain, "layers.0.qkv": mins}, "qkv") == 8 / 11
    assert dots_share({"layers.0.qkv": halves}, "qkv") == 8 / 14
    assert dots_share({"layers.0.qkv": PackedMatrix("bf16", 32, 64, 0, 1)}, "qkv") == 1
    mixed = {"layers.0.qkv": plain, "layers.1.qkv": mins}
    assert dots_share(mixed, "qkv") == pytest.approx(2 / (10 / 8 + 11 / 8))


def test_only_steps_in_which_all_streams_decode_count() -> None:
    point = Point(streams=2, prompt=16, output=8)
    assert point.is_of(StepLoad.decode(2, 30))
    assert not point.is_of(StepLoad.decode(1, 30))
    assert not point.is_of(StepLoad((1, 16), (20, 0), 2))
    assert point.typical == StepLoad.decode(2, 20)

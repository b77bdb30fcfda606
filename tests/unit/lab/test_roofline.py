"""The share of the roofline that lab/roofline prints, by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("inferloop.engine.compute.native._native")

from lab.roofline import Model, Point, Step, row_of

from inferloop.core.step_cost import StepLoad, WeightBytes
from inferloop.core.units import MIB
from inferloop.models.resolve import ModelFiles
from inferloop.plan.roofline import BandwidthCurve, Roofs

ROOFS = Roofs(BandwidthCurve(((MIB, 50e9),)), {"int8": 2e12, "bf16": 1e12, "fp32": 5e11})
NOTHING = dict.fromkeys(
    ("move", "embed", "norm", "qkv", "attention", "encode", "out", "gate_up", "down", "head", "sample"), 0
)


@pytest.fixture
def model(embedded_model: ModelFiles) -> Model:
    header = embedded_model.header
    return Model(header, WeightBytes.in_format(header.shape, "q4_1", "q8_0"), "int8", 23_040, "bf16")


def test_a_decode_is_its_median_step(model: Model) -> None:
    point = Point(streams=1, prompt=16, output=3)
    phases = {**NOTHING, "norm": 100, "qkv": 150, "sample": 500}
    steps = [Step(StepLoad.decode(1, past), 0.004, cycle, phases, 1000) for past, cycle in ((16, 9.0), (18, 0.005))]
    row = row_of(point, steps, model, ROOFS)
    moved = 96_436_224 + 612 + 140_544 + 23_040 * (17 + 1)
    assert row.num_bytes == moved
    assert row.bytes_per_s == 50e9
    assert row.attainable == pytest.approx((moved + 30 * 8448 * 4) / 50e9 * 1e3)
    assert row.measured == pytest.approx(4.0)
    assert row.cycle == pytest.approx(5.0)  # the first one began elsewhere
    assert row.share == pytest.approx(row.attainable / 4)
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
    assert row.num_bytes > whole.num_bytes  # weights and the first half are read twice


def test_only_steps_in_which_all_streams_decode_count() -> None:
    point = Point(streams=2, prompt=16, output=8)
    assert point.is_of(StepLoad.decode(2, 30))
    assert not point.is_of(StepLoad.decode(1, 30))
    assert not point.is_of(StepLoad((1, 16), (20, 0), 2))
    assert point.typical == StepLoad.decode(2, 20)

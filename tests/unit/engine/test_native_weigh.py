"""The bytes that a step is said to move are those of the packed model."""

from __future__ import annotations

import pytest

from inferloop.core.shape import Experts
from inferloop.core.step_cost import StepLoad, WeightBytes, step_cost
from inferloop.engine.compute.native.config import Weights
from inferloop.engine.compute.native.packed import PackedMatrix
from inferloop.engine.compute.native.plan import plan_packing
from inferloop.engine.compute.native.weigh import multiplied_in, weight_bytes
from inferloop.models.headers import ModelHeader
from inferloop.models.resolve import ModelFiles


def packed_bytes(header: ModelHeader, weights: Weights) -> WeightBytes:
    layout = plan_packing(header, weights).layout
    return weight_bytes(layout.matrices, {name: count for name, (_, count) in layout.vectors.items()})


def test_the_embedded_model_moves_what_the_arithmetic_says(embedded_model: ModelFiles) -> None:
    shape = embedded_model.header.shape
    counted = packed_bytes(embedded_model.header, "stored")
    assert counted == WeightBytes.in_format(shape, "q4_1", "q8_0")
    cost = step_cost(shape, StepLoad.decode(1, 0), counted)
    assert sum(cost[name].read_bytes for name in ("qkv", "out", "gate_up", "down", "head")) == 96_436_224


@pytest.mark.parametrize(
    ("weights", "kind"), [("stored", "int8"), ("int8", "int8"), ("bf16", "bf16"), ("fp32", "fp32")]
)
def test_all_that_is_packed_is_counted_once(embedded_model: ModelFiles, weights: Weights, kind: str) -> None:
    layout = plan_packing(embedded_model.header, weights).layout
    counted = packed_bytes(embedded_model.header, weights)
    total = counted.qkv + counted.out + counted.gate_up + counted.down + counted.head + counted.norms
    assert total == layout.num_bytes
    assert multiplied_in(layout.matrices) == kind
    if weights in ("bf16", "fp32"):
        assert counted == WeightBytes.in_format(embedded_model.header.shape, weights)


def test_of_experts_those_count_that_a_token_goes_through() -> None:
    of_expert = {"gate_up": 8 * 576, "down": 2 * 1152}
    matrices = {
        "embed": PackedMatrix("bf16", n=20, k=32, offset_bytes=0, tile_bytes=1024),
        "layers.0.router": PackedMatrix("f32", n=8, k=32, offset_bytes=0, tile_bytes=2048),
        "layers.0.gate_up": PackedMatrix("group", n=8 * 128, k=32, offset_bytes=0, tile_bytes=576),
        "layers.0.down": PackedMatrix("group", n=8 * 32, k=64, offset_bytes=0, tile_bytes=1152),
        "layers.1.gate_up": PackedMatrix("group", n=128, k=32, offset_bytes=0, tile_bytes=576),
        "layers.1.down": PackedMatrix("group", n=32, k=64, offset_bytes=0, tile_bytes=1152),
    }
    counted = weight_bytes(matrices, {}, Experts(num=8, per_token=3, ffn_size=64, layers=(0,)))
    assert counted.gate_up == 3 * of_expert["gate_up"] + 2048 + of_expert["gate_up"]
    assert counted.down == 3 * of_expert["down"] + of_expert["down"]


def test_a_head_of_its_own_padding_and_biases_by_hand() -> None:
    matrices = {
        "embed": PackedMatrix("bf16", n=20, k=32, offset_bytes=0, tile_bytes=1024),
        "head": PackedMatrix("f32", n=20, k=32, offset_bytes=0, tile_bytes=2048),
    }
    for i in range(2):
        matrices |= {
            f"layers.{i}.qkv": PackedMatrix("group", n=64, k=32, offset_bytes=0, tile_bytes=576),
            f"layers.{i}.out": PackedMatrix("group", n=32, k=32, offset_bytes=0, tile_bytes=320, bits=4),
            f"layers.{i}.gate_up": PackedMatrix("group", n=128, k=32, offset_bytes=0, tile_bytes=576),
            f"layers.{i}.down": PackedMatrix("group", n=32, k=64, offset_bytes=0, tile_bytes=1152),
        }
    vectors = {"norm": 32, "rope_factors": 8, "layers.0.input_norm": 32, "layers.0.qkv.bias": 64}
    assert weight_bytes(matrices, vectors) == WeightBytes(
        qkv=2 * 4 * 576,
        out=2 * 2 * 320,
        gate_up=2 * 8 * 576,
        down=2 * 2 * 1152,
        head=2 * 2048,
        embedding_row=2 * 1024 / 20,
        norms=4 * (32 + 32 + 64),
    )
    assert multiplied_in(matrices) == "int8"

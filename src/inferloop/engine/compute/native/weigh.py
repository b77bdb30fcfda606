"""What a packed model costs a step, in the words of core.step_cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from inferloop.core.hardware import OpKind
from inferloop.core.shape import Experts
from inferloop.core.step_cost import WeightBytes
from inferloop.engine.compute.native.packed import Format, PackedMatrix

_MULTIPLIED_IN: dict[Format, OpKind] = {"group": "int8", "bf16": "bf16", "f32": "fp32"}


def weight_bytes(
    matrices: Mapping[str, PackedMatrix], vector_lengths: Mapping[str, int], experts: Experts | None = None
) -> WeightBytes:
    """Of a model's matrices as they lie in memory, padding included, and of its gains and biases in fp32. Of `experts`
    what one token goes through, as step_cost counts them, and the routers with their `gate_up`."""
    of_layers: Counter[str] = Counter()
    for name, matrix in matrices.items():
        layer, _, kind = name.rpartition(".")
        if not layer:
            continue
        num_bytes = matrix.num_bytes
        if experts is not None and kind in ("gate_up", "down") and f"{layer}.router" in matrices:
            num_bytes = num_bytes * experts.per_token // experts.num
        of_layers["gate_up" if kind == "router" else kind] += num_bytes
    embedding = matrices["embed"]
    return WeightBytes(
        qkv=of_layers["qkv"],
        out=of_layers["out"],
        gate_up=of_layers["gate_up"],
        down=of_layers["down"],
        head=matrices.get("head", embedding).num_bytes,
        embedding_row=embedding.num_bytes / embedding.n,
        norms=4 * sum(num for name, num in vector_lengths.items() if name != "rope_factors"),
    )


def multiplied_in(matrices: Mapping[str, PackedMatrix]) -> OpKind:
    """What most weights are multiplied in."""
    weights: Counter[OpKind] = Counter()
    for matrix in matrices.values():
        weights[_MULTIPLIED_IN[matrix.format]] += matrix.n * matrix.k
    return weights.most_common(1)[0][0]

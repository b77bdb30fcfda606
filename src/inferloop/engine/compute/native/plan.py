"""What a packed model will hold and where, decided before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.groups import GROUP_TYPES, GroupForm, common_form
from inferloop.engine.compute.native import int8
from inferloop.engine.compute.native.config import Weights
from inferloop.engine.compute.native.packed import GROUP, Format, PackedMatrix, PackLayout
from inferloop.engine.compute.native.tiles import aligned, group_matrix, plain_matrix
from inferloop.engine.compute.stored import check_readable, half_split
from inferloop.models.headers import ModelHeader, Structure, TensorInfo


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """Stored tensors stacked, and then their rows in `order`."""

    matrix: PackedMatrix
    parts: tuple[TensorInfo, ...]
    order: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """The same of vectors, and then `added` to them; where a part is a number, so many zeros."""

    offset_bytes: int
    parts: tuple[TensorInfo | int, ...]
    order: NDArray[np.int64]
    added: float = 0.0


@dataclass(slots=True)
class PackPlan:
    """Offsets are into a buffer of `num_bytes`."""

    precision: str
    matrices: dict[str, MatrixPlan] = field(default_factory=dict)
    vectors: dict[str, VectorPlan] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def layout(self) -> PackLayout:
        return PackLayout(
            self.precision,
            {name: planned.matrix for name, planned in self.matrices.items()},
            {name: (planned.offset_bytes, len(planned.order)) for name, planned in self.vectors.items()},
            self.num_bytes,
        )


def plan_packing(header: ModelHeader, weights: Weights) -> PackPlan:
    """Raises ModelFileError for a structure that the native kernels have not."""
    shape = header.shape
    if len(set(shape.kv_heads)) > 1:
        raise ModelFileError("the native runner needs the same number of KV heads in every layer")
    quantized = header.stored_precision in GROUP_TYPES
    precision = weights if weights != "stored" else header.stored_precision if quantized else "bf16"
    planner = _Planner(header, weights, PackPlan(precision))
    planner.matrix("embed", "model.embed_tokens")
    if not shape.tied_embeddings:
        planner.matrix("head", "lm_head")
    planner.norm("norm", "model.norm")
    if header.rope.factors_tensor:
        planner.vector("rope_factors", header.rope.factors_tensor)
    for i in range(shape.num_layers):
        num_experts = shape.experts.num if shape.experts is not None and i in shape.experts.layers else 0
        _layer(planner, f"layers.{i}.", f"model.layers.{i}.", header.structure, num_experts)
    return planner.plan


def _layer(planner: _Planner, to: str, prefix: str, structure: Structure, num_experts: int) -> None:
    """In the order in which a step reads them."""
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    after = prefix + "post_attention_layernorm"
    planner.norm(to + "input_norm", prefix + "input_layernorm")
    planner.matrix(to + "qkv", *(attention + f"{part}_proj" for part in "qkv"))
    planner.optional_norm(to + "q_norm", attention + "q_norm")
    planner.optional_norm(to + "k_norm", attention + "k_norm")
    planner.matrix(to + "out", attention + "o_proj")
    if structure.output_norms:
        planner.norm(to + "attended_norm", after)
    planner.norm(to + "post_norm", prefix + "pre_feedforward_layernorm" if structure.output_norms else after)
    if num_experts:
        planner.matrix(to + "router", mlp + "gate", form="f32")
    feeds = [f"{mlp}experts.{e}." for e in range(num_experts)] or [mlp]
    planner.matrix(to + "gate_up", *(feed + part for feed in feeds for part in ("gate_proj", "up_proj")), in_turn=True)
    planner.matrix(to + "down", *(feed + "down_proj" for feed in feeds))
    if structure.output_norms:
        planner.norm(to + "fed_norm", prefix + "post_feedforward_layernorm")


class _Planner:
    def __init__(self, header: ModelHeader, weights: Weights, plan: PackPlan) -> None:
        self.plan = plan
        self._tensors, self._head_dim, self._weights = header.tensors, header.shape.head_dim, weights
        self._norm_offset = header.structure.norm_offset

    def vector(self, name: str, stored: str) -> None:
        info = self._tensors[stored]
        self._vector(name, (info,), np.arange(info.shape[0]))

    def norm(self, name: str, module: str) -> None:
        info = self._tensors[module + ".weight"]
        self._vector(name, (info,), np.arange(info.shape[0]), self._norm_offset)

    def optional_norm(self, name: str, module: str) -> None:
        if module + ".weight" in self._tensors:
            self.norm(name, module)

    def matrix(self, name: str, *modules: str, in_turn: bool = False, form: Format | None = None) -> None:
        """`in_turn`: of every two, 32 outputs of the first, 32 of the second, and so on; else one after the other.
        `form`: whatever the weights are kept in."""
        parts = tuple(self._tensors[module + ".weight"] for module in modules)
        for part in parts:
            check_readable(part)
        n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
        if k % GROUP or (in_turn and parts[0].shape[0] % GROUP):
            first = parts[0]
            raise ModelFileError(
                f"{first.file}: tensor {first.name} is {first.shape[0]} x {k}, "
                f"and the native runner needs multiples of {GROUP}"
            )
        kept = form or _form(self._weights, [part.dtype for part in parts])
        at = self.plan.num_bytes
        matrix = group_matrix(kept, n, k, at) if isinstance(kept, GroupForm) else plain_matrix(kept, n, k, at)
        order = np.concatenate(list(self._row_numbers(parts)))
        if in_turn:
            order = order.reshape(len(parts) // 2, 2, -1, GROUP).swapaxes(1, 2).reshape(-1)
        self.plan.matrices[name] = MatrixPlan(matrix, parts, order)
        self.plan.num_bytes += matrix.num_bytes
        biases = [self._tensors.get(module + ".bias") for module in modules]
        if any(bias is not None for bias in biases):
            filled = tuple(b if b is not None else w.shape[0] for b, w in zip(biases, parts, strict=True))
            self._vector(name + ".bias", filled, order)

    def _vector(
        self, name: str, parts: tuple[TensorInfo | int, ...], order: NDArray[np.int64], added: float = 0.0
    ) -> None:
        self.plan.vectors[name] = VectorPlan(self.plan.num_bytes, parts, order, added)
        self.plan.num_bytes += aligned(4 * len(order))

    def _row_numbers(self, parts: tuple[TensorInfo, ...]) -> Iterator[NDArray[np.int64]]:
        """Where each part's rows stand in the stack, rotary pairs put right."""
        begin = 0
        for part in parts:
            yield half_split(np.arange(begin, begin + part.shape[0]), part, self._head_dim)
            begin += part.shape[0]


def _form(weights: Weights, dtypes: list[str]) -> GroupForm | Format:
    if weights == "int8":
        return int8.FORM
    if weights != "stored":
        return "f32" if weights == "fp32" else "bf16"
    quantized = [GROUP_TYPES[dtype].form for dtype in dtypes if dtype in GROUP_TYPES]
    if not quantized:
        return "bf16"
    return common_form(quantized) if len(quantized) == len(dtypes) else "f32"

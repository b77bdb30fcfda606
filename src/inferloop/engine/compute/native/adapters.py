"""An adapter in the layout of cpp/adapter.h, beside the packed model that it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import Product
from inferloop.engine.compute.adapter import PARTS, Adapter, LowRank
from inferloop.engine.compute.native import int8
from inferloop.engine.compute.native.packed import GROUP, TILE, Format, PackedMatrix, PackedModel, PackLayout
from inferloop.engine.compute.native.packfile import pack_in_memory
from inferloop.engine.compute.native.tiles import group_matrix, plain_matrix, write_groups, write_plain
from inferloop.engine.schedule.step import Float32, Int32
from inferloop.models.headers import ModelHeader
from inferloop.models.headers.tensors import expected_shapes

_BF16_MAX = 3.3895e38


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """`packed`: the matrices "layers.{i}.{product}.a" and ".b" of the products that it changes. `columns`, by
    "layers.{i}.{product}": from which output of a on the tiles of b take their inputs, -1 for those that stay."""

    packed: PackedModel
    columns: Mapping[str, Int32]


def pack_adapter(adapter: Adapter, model: ModelHeader, packed: PackedModel) -> PackedAdapter:
    """`a` of each product in the format that takes its rows (8-bit codes where the weights are codes), `b` in bf16, and
    in fp32 where the weights are. Raises ModelFileError for numbers that such a format cannot hold."""
    shapes = expected_shapes(model.shape, model.structure)
    matrices: dict[str, PackedMatrix] = {}
    values: dict[str, Float32] = {}
    columns: dict[str, Int32] = {}
    num_bytes = 0
    for layer in range(model.shape.num_layers):
        for product, parts in PARTS.items():
            modules = [f"model.layers.{layer}.{part}" for part in parts]
            if not any(module in adapter.updates for module in modules):
                continue
            name = f"layers.{layer}.{product}"
            updates = [(shapes[module + ".weight"][0], adapter.updates.get(module)) for module in modules]
            kind = packed.matrices[name].format
            a, b, columns[name] = _stacked(updates, product, balanced=kind == "group")
            if kind == "group":
                matrices[f"{name}.a"] = group_matrix(int8.FORM, len(a), a.shape[1], num_bytes)
            else:
                matrices[f"{name}.a"] = plain_matrix(kind, len(a), a.shape[1], num_bytes)
            num_bytes += matrices[f"{name}.a"].num_bytes
            form_of_b: Format = "f32" if kind == "f32" else "bf16"
            matrices[f"{name}.b"] = plain_matrix(form_of_b, len(b), b.shape[1], num_bytes)
            num_bytes += matrices[f"{name}.b"].num_bytes
            values[f"{name}.a"], values[f"{name}.b"] = a, b

    def fill(buffer: NDArray[np.uint8]) -> None:
        for name, matrix in matrices.items():
            tiles = buffer[matrix.offset_bytes : matrix.offset_bytes + matrix.num_bytes]
            _write(matrix, values[name], tiles.reshape(-1, matrix.tile_bytes))

    return PackedAdapter(pack_in_memory(PackLayout("adapter", matrices, {}, num_bytes), fill), columns)


def _stacked(
    updates: list[tuple[int, LowRank | None]], product: Product, *, balanced: bool
) -> tuple[Float32, Float32, Int32]:
    """a of all matrices of a product, each filled up with zeros to one even rank; b in the product's order of outputs;
    and the first input of each of b's tiles. Of each matrix its number of outputs. `balanced`: rows of a are brought
    near 1 and b's columns make up for it, exactly: scales of codes are of few bits."""
    present = [update for _, update in updates if update is not None]
    depth = max(len(update.a) for update in present)
    depth += depth % 2
    a = np.zeros((len(present) * depth, present[0].a.shape[1]), np.float32)
    b = np.zeros((sum(num for num, _ in updates), depth), np.float32)
    columns = np.full(len(b), -1, np.int32)
    begin = column = 0
    for num, update in updates:
        if update is not None:
            rank = len(update.a)
            rows, outputs = a[column : column + rank], b[begin : begin + num, :rank]
            rows[:], outputs[:], columns[begin : begin + num] = update.a, update.b, column
            column += depth
            if balanced:
                _, exponents = np.frexp(np.abs(rows).max(-1))
                with np.errstate(over="ignore", under="ignore"):
                    rows[:], outputs[:] = np.ldexp(rows, -exponents[:, None]), np.ldexp(outputs, exponents)
        begin += num
    if product == "gate_up":  # as the weights: 32 outputs of gate and 32 of up in turn
        b = b.reshape(2, -1, GROUP, depth).swapaxes(0, 1).reshape(-1, depth)
        columns = columns.reshape(2, -1, GROUP).swapaxes(0, 1).reshape(-1)
    return a, b, np.ascontiguousarray(columns[::TILE])


def _write(matrix: PackedMatrix, values: Float32, tiles: NDArray[np.uint8]) -> None:
    rows = np.zeros((len(tiles) * TILE, matrix.k), np.float32)
    rows[: len(values)] = values
    if not np.abs(rows).max() <= (_BF16_MAX if matrix.format == "bf16" else np.finfo(np.float32).max):
        raise ModelFileError(f"an adapter has numbers that {matrix.format} cannot hold")
    if matrix.format != "group":
        write_plain(matrix.format, rows, tiles)
        return
    codes = int8.quantize(rows)
    if not np.isfinite(codes.scales).all():
        raise ModelFileError("an adapter has numbers that 8-bit codes cannot hold")
    write_groups(codes, tiles)

"""An adapter in the layout of cpp/adapter.h, beside the packed model that it changes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import Product
from inferloop.engine.compute.adapter import Adapter, LowRank, merged
from inferloop.engine.compute.native import int8
from inferloop.engine.compute.native.packed import GROUP, TILE, PackedMatrix, PackedModel, PackLayout
from inferloop.engine.compute.native.packfile import pack_in_memory
from inferloop.engine.compute.native.tiles import group_matrix, plain_matrix, write_groups, write_plain
from inferloop.engine.schedule.step import Float32
from inferloop.models.headers import ModelHeader


def pack_adapter(adapter: Adapter, model: ModelHeader, packed: PackedModel) -> PackedModel:
    """`a` of each product in the format that takes its rows (8-bit codes where the weights are codes), `b` in fp32.
    Raises ModelFileError for numbers that such a format cannot hold."""
    matrices: dict[str, PackedMatrix] = {}
    values: dict[str, Float32] = {}
    num_bytes = 0
    for (layer, product), update in merged(adapter, model).items():
        name = f"layers.{layer}.{product}"
        kind = packed.matrices[name].format
        for side, rows in zip("ab", _filled_up(update, product, balanced=kind == "group"), strict=True):
            n, k = rows.shape
            if side == "a" and kind == "group":
                matrix = group_matrix(int8.FORM, n, k, num_bytes)
            else:
                matrix = plain_matrix(kind if side == "a" else "f32", n, k, num_bytes)
            matrices[f"{name}.{side}"], values[f"{name}.{side}"] = matrix, rows
            num_bytes += matrix.num_bytes

    def fill(buffer: NDArray[np.uint8]) -> None:
        for name, matrix in matrices.items():
            tiles = buffer[matrix.offset_bytes : matrix.offset_bytes + matrix.num_bytes]
            _write(matrix, values[name], tiles.reshape(-1, matrix.tile_bytes))

    return pack_in_memory(PackLayout("adapter", matrices, {}, num_bytes), fill)


def _filled_up(update: LowRank, product: Product, *, balanced: bool) -> tuple[Float32, Float32]:
    """With zeros to a rank that is a multiple of 32, and outputs in the product's order. `balanced`: rows of a are
    brought near 1 and b's columns make up for it, exactly: scales of codes are of few bits."""
    rank = len(update.a)
    num = -(-rank // GROUP) * GROUP
    a, b = np.zeros((num, update.a.shape[1]), np.float32), np.zeros((len(update.b), num), np.float32)
    a[:rank], b[:, :rank] = update.a, update.b
    if balanced:
        _, exponents = np.frexp(np.abs(a).max(-1))
        with np.errstate(over="ignore", under="ignore"):
            a, b = np.ldexp(a, -exponents[:, None]), np.ldexp(b, exponents)
    if product == "gate_up":  # as the weights: 32 outputs of gate and 32 of up in turn
        b = b.reshape(2, -1, GROUP, num).swapaxes(0, 1).reshape(-1, num)
    if not np.isfinite(b).all():
        raise ModelFileError("an adapter has numbers that are too large together")
    return a, b


def _write(matrix: PackedMatrix, values: Float32, tiles: NDArray[np.uint8]) -> None:
    rows = np.zeros((len(tiles) * TILE, matrix.k), np.float32)
    rows[: len(values)] = values
    if matrix.format != "group":
        write_plain(matrix.format, rows, tiles)
        return
    codes = int8.quantize(rows)
    if not np.isfinite(codes.scales).all():
        raise ModelFileError("an adapter has numbers that 8-bit codes cannot hold")
    write_groups(codes, tiles)

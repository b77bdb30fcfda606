"""A packed matrix back to fp32: what the kernels' results are checked against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferloop.engine.compute.native.packed import PackedModel
from inferloop.engine.compute.native.tiles import group_form, read_group_tiles, read_plain_tiles


def unpack(model: PackedModel, name: str) -> NDArray[np.float32]:
    """fp32 [n][k] of the matrix of this name, exactly what its tiles say."""
    matrix = model.matrices[name]
    tiles = model.buffer[matrix.offset_bytes : matrix.offset_bytes + matrix.num_bytes].reshape(-1, matrix.tile_bytes)
    if matrix.format == "group":
        return read_group_tiles(group_form(matrix), tiles, matrix.k).values()[: matrix.n]
    return read_plain_tiles(matrix.format, tiles, matrix.k)[: matrix.n]

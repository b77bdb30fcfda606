"""Rows of weights <-> the tiles that cpp/types.h describes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferloop.engine.compute.groups import GroupCodes, GroupForm
from inferloop.engine.compute.native.packed import GROUP, TILE, Format, PackedMatrix

_ALIGNMENT = 64
Bytes = NDArray[np.uint8]


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def plain_matrix(form: Format, n: int, k: int, offset_bytes: int) -> PackedMatrix:
    """Of f32 or bf16."""
    return PackedMatrix(form, n, k, offset_bytes, aligned(k * TILE * (4 if form == "f32" else 2)))


def group_matrix(form: GroupForm, n: int, k: int, offset_bytes: int) -> PackedMatrix:
    return PackedMatrix(
        "group",
        n,
        k,
        offset_bytes,
        aligned(k // GROUP * sum(_record(form))),
        bits=form.bits,
        group=form.group,
        code_offset=form.offset,
        wide=form.wide,
        has_min=form.has_min,
    )


def group_form(matrix: PackedMatrix) -> GroupForm:
    return GroupForm(matrix.bits, matrix.group, matrix.code_offset, matrix.wide, matrix.has_min)


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def write_plain(form: Format, rows: NDArray[np.float32], tiles: Bytes) -> None:
    """16 T rows of k weights into T tiles, uint8 [T][tile_bytes]."""
    num_tiles, k = len(tiles), rows.shape[1]
    values: NDArray[Any] = rows if form == "f32" else bf16_bits(rows)
    side_by_side = 1 if form == "f32" else 2
    cut = values.reshape(num_tiles, TILE, k // side_by_side, side_by_side).swapaxes(1, 2)
    tiles[:, : values.itemsize * TILE * k].view(values.dtype).reshape(cut.shape)[:] = cut


def write_groups(rows: GroupCodes, tiles: Bytes) -> None:
    """The same of codes; rows.form is the matrix's."""
    form, num_tiles = rows.form, len(tiles)
    num_records = rows.codes.shape[1] // GROUP
    codes, scales, mins = _fields(form, tiles, num_records)
    inputs = rows.codes.reshape(num_tiles, TILE, num_records, GROUP // 4, 4).transpose(0, 2, 3, 1, 4)
    inputs = inputs.reshape(num_tiles, num_records, -1)
    if form.bits == 4:
        half = inputs.shape[-1] // 2
        inputs = inputs[..., :half] | inputs[..., half:] << np.uint8(4)
    codes[:] = inputs
    for numbers, field in ((rows.scales, scales), (rows.mins, mins)):
        if numbers is not None:
            of_record = numbers.reshape(num_tiles, TILE, num_records, -1).transpose(0, 2, 3, 1)
            field[:] = np.ascontiguousarray(of_record, _number(form)).view(np.uint8).reshape(field.shape)


def read_plain_tiles(form: Format, tiles: Bytes, k: int) -> NDArray[np.float32]:
    """T tiles back to fp32 [16 T][k]."""
    if form == "f32":
        values = np.ascontiguousarray(tiles[:, : 4 * TILE * k]).view(np.float32)
        return values.reshape(-1, k, TILE).swapaxes(1, 2).reshape(-1, k)
    bits = np.ascontiguousarray(tiles[:, : 2 * TILE * k]).view(np.uint16).reshape(-1, k // 2, TILE, 2)
    return (bits.swapaxes(1, 2).reshape(-1, k).astype(np.uint32) << 16).view(np.float32)


def read_group_tiles(form: GroupForm, tiles: Bytes, k: int) -> GroupCodes:
    num_tiles, num_records = len(tiles), k // GROUP
    codes, scales, mins = _fields(form, tiles, num_records)
    if form.bits == 4:
        codes = np.concatenate([codes & 0x0F, codes >> 4], -1)
    inputs = codes.reshape(num_tiles, num_records, GROUP // 4, TILE, 4).transpose(0, 3, 1, 2, 4)

    def numbers(field: Bytes) -> NDArray[np.float32]:
        values = np.ascontiguousarray(field).view(_number(form)).reshape(num_tiles, num_records, -1, TILE)
        return values.transpose(0, 3, 1, 2).astype(np.float32).reshape(num_tiles * TILE, -1)

    return GroupCodes(form, inputs.reshape(-1, k), numbers(scales), numbers(mins) if form.has_min else None)


def _number(form: GroupForm) -> str:
    return "<f4" if form.wide else "<f2"


def _record(form: GroupForm) -> tuple[int, int, int]:
    """Bytes of codes, scales and mins."""
    numbers = GROUP // form.group * TILE * (4 if form.wide else 2)
    return GROUP * TILE * form.bits // 8, numbers, numbers if form.has_min else 0


def _fields(form: GroupForm, tiles: Bytes, num_records: int) -> tuple[Bytes, Bytes, Bytes]:
    """Views of the codes, scales and mins, each [tiles][records][bytes]."""
    codes, scales, mins = _record(form)
    record = codes + scales + mins
    cut = np.lib.stride_tricks.as_strided(
        tiles, (len(tiles), num_records, record), (tiles.strides[0], record, 1), writeable=tiles.flags.writeable
    )
    return cut[..., :codes], cut[..., codes : codes + scales], cut[..., codes + scales :]

"""A model file's weights -> the native kernels' layout. Quantized weights keep their own codes and scales.

What "stored" makes of each matrix: quantized blocks become groups, exactly; bf16 stays; fp32 and fp16 are rounded to
bf16, because the kernels have no fp16 form and activations beside them would be bf16 anyway. Parts of a merged matrix
that differ meet in the smallest common form of groups, or, when one of them is not quantized, in fp32, all exactly.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.groups import GroupCodes, GroupForm, promote, read_groups
from inferloop.engine.compute.native import int8
from inferloop.engine.compute.native.config import Weights
from inferloop.engine.compute.native.packed import TILE, PackedModel
from inferloop.engine.compute.native.packfile import Fill, make_room, pack_in_memory, read_packed, write_packed
from inferloop.engine.compute.native.plan import MatrixPlan, PackPlan, VectorPlan, plan_packing
from inferloop.engine.compute.native.revisions import LAYOUT
from inferloop.engine.compute.native.tiles import group_form, write_groups, write_plain
from inferloop.engine.compute.stored import read_tensor, stored_rows, unchanged, values_of
from inferloop.models.cache import cache_root
from inferloop.models.headers import ModelHeader, TensorInfo

Progress = Callable[[int, int], None]
"""(bytes packed, of how many)."""

_log = logging.getLogger(__name__)
_CHUNK_WEIGHTS = 1 << 20
"""Converted at once, which bounds the memory that packing takes."""
_PATIENCE_S = 2.0
"""With another process that packs, before a word is said of it."""


def pack_model(
    header: ModelHeader,
    weights: Weights,
    *,
    digest: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> PackedModel:
    """With the weights' `digest`: packed once into a file of the cache (None: the user's), mapped ever after. Without
    one, or when the cache cannot be written, packed into memory.

    Raises ModelFileError for tensors that cannot be read or that the native kernels have no form for.
    """
    if digest is not None:
        try:
            found = pack_into_cache(header, weights, digest, cache_dir=cache_dir, progress=progress)
            if found is not None:
                return found
        except OSError as problem:
            _log.warning("the packed model is kept in memory and not in the cache: %s", problem)
    plan = plan_packing(header, weights)
    return pack_in_memory(plan.layout, _filler(plan, header, weights, progress))


def pack_into_cache(
    header: ModelHeader,
    weights: Weights,
    digest: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> PackedModel | None:
    """As `pack_model`, with the cache or not at all. None: another process took away what was packed. Raises OSError,
    too, for a cache that cannot be written."""
    plan = plan_packing(header, weights)
    layout = plan.layout
    # Which the architecture says, and not the weights that the digest is of.
    added = "-gains" if header.structure.norm_offset else ""
    path = cache_root(cache_dir) / "packed" / f"{digest[:32]}-{weights}{added}-{LAYOUT}.bin"
    found = read_packed(path, layout)
    if found is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.with_name(".lock")):  # of two that start at once, one packs
        found = read_packed(path, layout)
        if found is None:
            make_room(path)
            write_packed(path, layout, _filler(plan, header, weights, progress))
            found = read_packed(path, layout)
    return found


def _filler(plan: PackPlan, header: ModelHeader, weights: Weights, progress: Progress | None) -> Fill:
    def fill(buffer: NDArray[np.uint8]) -> None:
        with unchanged(header):
            _fill(plan, weights, buffer, progress)

    return fill


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout  # not for who only maps what was packed before

    lock = FileLock(path)
    try:
        lock.acquire(timeout=_PATIENCE_S)
    except Timeout:
        _log.warning("waiting for another process, which packs a model in %s", path.parent)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fill(plan: PackPlan, weights: Weights, buffer: NDArray[np.uint8], progress: Progress | None) -> None:
    for vector in plan.vectors.values():
        _pack_vector(vector, buffer)
    for planned in plan.matrices.values():
        for end in _pack_matrix(planned, weights, buffer):
            if progress is not None:
                progress(end, plan.num_bytes)


def _pack_vector(plan: VectorPlan, buffer: NDArray[np.uint8]) -> None:
    parts = [np.zeros(part, np.float32) if isinstance(part, int) else read_tensor(part) for part in plan.parts]
    values = np.concatenate(parts)[plan.order] + np.float32(plan.added)
    buffer[plan.offset_bytes : plan.offset_bytes + values.nbytes].view(np.float32)[:] = values


def _pack_matrix(plan: MatrixPlan, weights: Weights, buffer: NDArray[np.uint8]) -> Iterator[int]:
    """Yields the end of each part of the buffer once it is written."""
    matrix = plan.matrix
    tiles = buffer[matrix.offset_bytes : matrix.offset_bytes + matrix.num_bytes].reshape(-1, matrix.tile_bytes)
    tiles_at_once = max(1, _CHUNK_WEIGHTS // matrix.k // TILE)
    for begin in range(0, len(tiles), tiles_at_once):
        chunk = tiles[begin : begin + tiles_at_once]
        pieces = _pieces(plan.parts, plan.order[TILE * begin : TILE * (begin + len(chunk))])
        if matrix.format == "group":
            write_groups(_stacked_groups(pieces, group_form(matrix), weights, TILE * len(chunk), matrix.k), chunk)
        else:
            rows = np.zeros((TILE * len(chunk), matrix.k), np.float32)
            for part, stored, places in pieces:
                rows[places] = values_of(part.dtype, stored)
            write_plain(matrix.format, rows, chunk)
        yield matrix.offset_bytes + (begin + len(chunk)) * matrix.tile_bytes


_Piece = tuple[TensorInfo, NDArray[np.uint8], NDArray[np.intp]]
"""Rows of a part as they are stored, and where they go."""


def _pieces(parts: tuple[TensorInfo, ...], order: NDArray[np.int64]) -> list[_Piece]:
    found: list[_Piece] = []
    least, most = int(order.min()), int(order.max())
    begin = 0
    for part in parts:
        end = begin + part.shape[0]
        if begin <= most and end > least:  # of many, which experts are, a chunk has few
            places = np.flatnonzero((order >= begin) & (order < end))
            if len(places):
                wanted = order[places] - begin
                first = int(wanted.min())  # those of a chunk lie close together
                found.append((part, stored_rows(part, first, int(wanted.max()) + 1)[wanted - first], places))
        begin = end
    return found


def _stacked_groups(pieces: list[_Piece], form: GroupForm, weights: Weights, num_rows: int, k: int) -> GroupCodes:
    """Rows that no piece has are zero, as padding must be."""
    num_scales = k // form.group
    out = GroupCodes(
        form,
        np.zeros((num_rows, k), np.uint8),
        np.zeros((num_rows, num_scales), np.float32),
        np.zeros((num_rows, num_scales), np.float32) if form.has_min else None,
    )
    for part, stored, places in pieces:
        groups = int8.to_int8(part.dtype, stored) if weights == "int8" else read_groups(part.dtype, stored)
        if not all(np.isfinite(numbers).all() for numbers in (groups.scales, groups.mins) if numbers is not None):
            raise ModelFileError(f"{part.file}: tensor {part.name} has weights that are not finite, or far too large")
        groups = promote(groups, form)
        out.codes[places], out.scales[places] = groups.codes, groups.scales
        if out.mins is not None:
            out.mins[places] = groups.mins
    return out

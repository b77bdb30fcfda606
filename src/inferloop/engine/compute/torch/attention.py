"""Attention over paged keys and values, for a step that mixes decoding sequences and prompt chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from inferloop.engine.compute.torch.cache import PagedCache
from inferloop.engine.compute.torch.model import TILE_ROWS, softcapped
from inferloop.engine.schedule.step import Int32, Int64, StepPlan
from inferloop.models.headers import ModelHeader

Window = int | None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How scores come about, and of each layer how many keys a query sees, itself included; None: all before it."""

    windows: tuple[Window, ...]
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, header: ModelHeader) -> AttentionSpec:
        shape, structure = header.shape, header.structure
        windows = tuple(structure.window(i) for i in range(shape.num_layers))
        scale = shape.head_dim**-0.5 if structure.query_scale is None else structure.query_scale
        return cls(windows, scale, structure.attention_softcap)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows start:end of the step, one sequence, its blocks (1, b) from that of the first key that anybody sees, how
    many keys they hold, and what is added to each row's scores, so that it sees its own past only."""

    start: int
    end: int
    blocks: Tensor
    num_keys: int
    mask: Tensor | None
    """None: the chunk starts the sequence, plain causal."""


@dataclass(frozen=True, slots=True)
class _Singles:
    """Sequences with one row: attended together, padded to the longest. `mask`: (n, 1, 1, keys)."""

    rows: Tensor
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _View:
    """What the layers with one window see."""

    singles: _Singles | None
    chunks: list[_Chunk]


class StepAttention:
    """Where a step's rows live in the cache, worked out once for each window and used by every layer that has it."""

    def __init__(
        self, cache: PagedCache, spec: AttentionSpec, plan: StepPlan, positions: Int64, device: torch.device
    ) -> None:
        self._cache, self._spec, self._device = cache, spec, device
        self._rows = torch.from_numpy(cache_rows(plan, positions, cache.block_size)).to(device)
        lengths = np.diff(plan.offsets)
        tables = np.maximum(plan.block_tables[0], 0).astype(np.int64)
        single, several = np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)
        self._views = {
            window: _View(
                self._prepare_singles(plan, single, tables, window) if len(single) else None,
                [self._chunk(plan, int(i), tables[i], window) for i in several],
            )
            for window in set(spec.windows)
        }

    def _prepare_singles(self, plan: StepPlan, single: Int64, tables: Int64, window: Window) -> _Singles:
        size = self._cache.block_size
        ends = plan.first_positions[single].astype(np.int64) + 1
        begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        first_blocks = begins // size
        width = int((-(-ends // size) - first_blocks).max())
        columns = first_blocks[:, None] + np.arange(width)
        blocks = tables[single[:, None], np.minimum(columns, tables.shape[1] - 1)]
        keys = first_blocks[:, None] * size + np.arange(width * size)
        hidden = (keys >= ends[:, None]) | (keys < begins[:, None])
        rows = torch.from_numpy(plan.offsets[:-1][single].astype(np.int64)).to(self._device)
        mask = self._mask(torch.from_numpy(hidden).to(self._device))[:, None, None, :]
        return _Singles(rows, torch.from_numpy(blocks).to(self._device), mask)

    def _chunk(self, plan: StepPlan, i: int, table: Int64, window: Window) -> _Chunk:
        start, end = int(plan.offsets[i]), int(plan.offsets[i + 1])
        first = int(plan.first_positions[i])
        size, num_known = self._cache.block_size, first + end - start
        first_block = 0 if window is None else max(0, first + 1 - window) // size
        blocks = torch.from_numpy(table[None, first_block : -(-num_known // size)]).to(self._device)
        mask = None
        if first or (window is not None and num_known > window):
            queries = torch.arange(first, num_known, device=self._device)[:, None]
            keys = torch.arange(first_block * size, num_known, device=self._device)
            mask = self._mask(~_visible(queries, keys, window))
        return _Chunk(start, end, blocks, num_known - first_block * size, mask)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See model.Attend. Writes the rows' keys and values first, so a row sees itself."""
        self._cache.write(layer, self._rows, k, v)
        view = self._views[self._spec.windows[layer]]
        if not view.chunks and view.singles is not None:
            return self._attend_singles(layer, q, view.singles)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if view.singles is not None:
            rows = view.singles.rows
            out[rows] = self._attend_singles(layer, q[rows], view.singles).view(-1, *q.shape[1:])
        for chunk in view.chunks:
            out[chunk.start : chunk.end] = self._attend_chunk(layer, q[chunk.start : chunk.end], chunk)
        return out.flatten(1)

    def _attend_singles(self, layer: int, q: Tensor, singles: _Singles) -> Tensor:
        keys, values = self._cache.gather(layer, singles.blocks)
        grouped = torch.unflatten(q, 1, (keys.shape[1], -1))  # the heads that share keys become rows of one query
        return self._attended(grouped, keys, values, singles.mask).flatten(1)

    def _attend_chunk(self, layer: int, q: Tensor, chunk: _Chunk) -> Tensor:
        keys, values = self._cache.gather(layer, chunk.blocks)
        keys, values = keys[:, :, : chunk.num_keys], values[:, :, : chunk.num_keys]
        return self._attended(q.transpose(0, 1)[None], keys, values, chunk.mask)[0].transpose(0, 1)

    def _attended(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q (n, heads, rows, head_dim), where several heads may share keys; `mask` None: plain causal."""
        if self._spec.softcap is None:
            causal = mask is None
            return F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, is_causal=causal, scale=self._spec.scale, enable_gqa=True
            )
        num_rows, shared = q.shape[2], q.shape[1] // keys.shape[1]
        if mask is None:
            mask = self._mask(torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).triu(1))
        if shared > 1:
            keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        scores = softcapped(q @ keys.transpose(2, 3) * self._spec.scale, self._spec.softcap)
        return torch.softmax(scores.float() + mask, -1).to(values.dtype) @ values

    def _mask(self, hidden: Tensor) -> Tensor:
        """To add to scores: minus infinity where `hidden` is true."""
        zeros = torch.zeros(hidden.shape, dtype=self._cache.dtype, device=self._device)
        return zeros.masked_fill_(hidden, float("-inf"))


def _visible(queries: Tensor, keys: Tensor, window: Window) -> Tensor:
    """Of positions, queries in rows (rows, 1)."""
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def cache_rows(plan: StepPlan, positions: Int64, block_size: int) -> Int64:
    """Flat cache row of every token of the plan."""
    owner = np.repeat(np.arange(plan.num_sequences), np.diff(plan.offsets))
    blocks: Int32 = plan.block_tables[0][owner, positions // block_size]
    return blocks.astype(np.int64) * block_size + positions % block_size


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows of the step, and of the tile; the sequence's blocks; by window, what each row of the tile sees."""

    rows: slice
    places: slice
    blocks: Tensor
    visible: dict[Window, Tensor]


class TiledAttention:
    """The deterministic way: one sequence and one aligned tile of TILE_ROWS positions at a time.

    Tile t holds positions TILE_ROWS * t onward and sees the keys of positions 0 .. TILE_ROWS * (t + 1) - 1, causally.
    A position always stands in the same row of a computation of the same shape, however the step was put together.
    """

    def __init__(
        self, cache: PagedCache, spec: AttentionSpec, plan: StepPlan, positions: Int64, device: torch.device
    ) -> None:
        self._cache, self._spec = cache, spec
        self._rows = torch.from_numpy(cache_rows(plan, positions, cache.block_size)).to(device)
        self._tiles = [tile for i in range(plan.num_sequences) for tile in self._tiles_of(plan, i, device)]

    def _tiles_of(self, plan: StepPlan, i: int, device: torch.device) -> list[_Tile]:
        """Those that the sequence touches."""
        start, first = int(plan.offsets[i]), int(plan.first_positions[i])
        end = first + int(plan.offsets[i + 1]) - start
        table = np.maximum(plan.block_tables[0][i], 0).astype(np.int64)
        tiles = []
        for tile in range(first // TILE_ROWS, -(-end // TILE_ROWS)):
            low, high = max(first, tile * TILE_ROWS), min(end, (tile + 1) * TILE_ROWS)
            num_keys = (tile + 1) * TILE_ROWS
            num_blocks = -(-num_keys // self._cache.block_size)
            padded = np.zeros(num_blocks, np.int64)
            padded[: len(table)] = table[:num_blocks]
            queries, keys = torch.arange(tile * TILE_ROWS, num_keys)[:, None], torch.arange(num_keys)
            tiles.append(
                _Tile(
                    slice(start + low - first, start + high - first),
                    slice(low - tile * TILE_ROWS, high - tile * TILE_ROWS),
                    torch.from_numpy(padded)[None].to(device),
                    {window: _visible(queries, keys, window).to(device) for window in set(self._spec.windows)},
                )
            )
        return tiles

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See model.Attend."""
        self._cache.write(layer, self._rows, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for tile in self._tiles:
            padded = q.new_zeros(TILE_ROWS, *q.shape[1:])
            padded[tile.places] = q[tile.rows]
            visible = tile.visible[self._spec.windows[layer]]
            out[tile.rows] = self._attend(layer, padded, tile.blocks, visible)[tile.places]
        return out.flatten(1)

    def _attend(self, layer: int, tile: Tensor, blocks: Tensor, visible: Tensor) -> Tensor:
        num_keys = visible.shape[1]
        keys, values = (t[0, :, :num_keys].contiguous() for t in self._cache.gather(layer, blocks))
        num_kv = keys.shape[0]
        grouped = (
            torch.unflatten(tile, 1, (num_kv, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        )  # (kv, group * tile, head_dim)
        scores = softcapped(torch.bmm(grouped, keys.transpose(1, 2)) * self._spec.scale, self._spec.softcap)
        scores = torch.unflatten(scores, 1, (-1, TILE_ROWS)).masked_fill(~visible, float("-inf"))
        out = torch.bmm(torch.softmax(scores, -1).flatten(1, 2), values)
        return torch.unflatten(out, 1, (-1, TILE_ROWS)).permute(2, 0, 1, 3).flatten(1, 2)

"""Attention over paged keys and values, for a step that mixes decoding sequences and prompt chunks.

A layer's cache is (num_blocks, block_size, 2, kv heads, head_dim): keys and values of a token side by side, so one
gather fetches both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from inferloop.core.shape import ModelShape
from inferloop.engine.compute.torch.model import TILE_ROWS
from inferloop.engine.schedule.step import Int32, Int64, StepPlan, UInt8


class PagedCache:
    """The KV blocks of all layers. Zeroed, so that what is masked away is finite."""

    def __init__(
        self, shape: ModelShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        size = (num_blocks, block_size, 2, shape.kv_heads[0], shape.head_dim)
        self._layers = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self._layers)

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v (tokens, kv heads, head_dim) at `rows` = block * block_size + place."""
        self._layers[layer].flatten(0, 1).index_copy_(0, rows, torch.stack([k, v], 1))

    def copy(self, pairs: Int32) -> None:
        """Copy whole blocks, pairs (m, 2) of from and to; every source is read before any destination is written."""
        for layer in self._layers:
            source, target = (torch.from_numpy(pairs[:, i].astype(np.int64)).to(layer.device) for i in (0, 1))
            layer.index_copy_(0, target, layer.index_select(0, source))

    def save(self, blocks: Int32) -> Tensor:
        """The content of `blocks` (m), uint8 (m, bytes of a block in all layers), on the cache's device."""
        index = self._index(blocks)
        return torch.stack([layer.index_select(0, index) for layer in self._layers], 1).flatten(1).view(torch.uint8)

    def load(self, blocks: Int32, data: UInt8) -> None:
        """Fill `blocks` (m) with what `save` gave, (m, bytes of a block in all layers)."""
        index, first = self._index(blocks), self._layers[0]
        content = torch.from_numpy(data).to(first.device).view(first.dtype)
        content = content.view(len(blocks), len(self._layers), *first.shape[1:])
        for i, layer in enumerate(self._layers):
            layer.index_copy_(0, index, content[:, i])

    def _index(self, blocks: Int32) -> Tensor:
        return torch.from_numpy(blocks.astype(np.int64)).to(self._layers[0].device)

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """blocks (n, b) -> keys and values, each (n, kv heads, b * block_size, head_dim)."""
        found = self._layers[layer].index_select(0, blocks.flatten())
        found = found.view(blocks.shape[0], blocks.shape[1] * self.block_size, *found.shape[2:])
        return found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows start:end of the step, one sequence, its blocks (1, b), and what each row may see."""

    start: int
    end: int
    blocks: Tensor
    num_keys: int
    mask: Tensor | None
    """None: the chunk starts the sequence, plain causal."""


class StepAttention:
    """Where a step's rows live in the cache, worked out once and used by every layer."""

    def __init__(self, cache: PagedCache, plan: StepPlan, positions: Int64, device: torch.device) -> None:
        self._cache = cache
        self._rows = torch.from_numpy(cache_rows(plan, positions, cache.block_size)).to(device)
        lengths = np.diff(plan.offsets)
        tables = np.maximum(plan.block_tables[0], 0).astype(np.int64)
        single = np.flatnonzero(lengths == 1)
        self._single_rows: Tensor | None = None
        if len(single):
            self._prepare_single(plan, single, tables, device)
        self._chunks = [self._chunk(plan, int(i), tables[i], device) for i in np.flatnonzero(lengths > 1)]

    def _prepare_single(self, plan: StepPlan, single: Int64, tables: Int64, device: torch.device) -> None:
        """Sequences with one row: attended together, padded to the longest."""
        num_keys = plan.first_positions[single].astype(np.int64) + 1
        width = -(-int(num_keys.max()) // self._cache.block_size)
        self._single_rows = torch.from_numpy(plan.offsets[:-1][single].astype(np.int64)).to(device)
        self._single_blocks = torch.from_numpy(tables[single, :width]).to(device)
        beyond = np.arange(width * self._cache.block_size)[None, :] >= num_keys[:, None]
        self._single_beyond = torch.from_numpy(beyond).to(device)[:, None, None, :]
        self._single_mask: Tensor | None = None

    def _chunk(self, plan: StepPlan, i: int, table: Int64, device: torch.device) -> _Chunk:
        start, end = int(plan.offsets[i]), int(plan.offsets[i + 1])
        first = int(plan.first_positions[i])
        num_keys = first + end - start
        blocks = torch.from_numpy(table[None, : -(-num_keys // self._cache.block_size)]).to(device)
        mask = None
        if first:
            mask = torch.arange(num_keys, device=device) <= torch.arange(first, num_keys, device=device)[:, None]
        return _Chunk(start, end, blocks, num_keys, mask)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See model.Attend. Writes the rows' keys and values first, so a row sees itself."""
        self._cache.write(layer, self._rows, k, v)
        if not self._chunks:
            return self._attend_single(layer, q)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self._single_rows is not None:
            out[self._single_rows] = self._attend_single(layer, q[self._single_rows]).view(-1, *q.shape[1:])
        for chunk in self._chunks:
            out[chunk.start : chunk.end] = self._attend_chunk(layer, q[chunk.start : chunk.end], chunk)
        return out.flatten(1)

    def _attend_single(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self._cache.gather(layer, self._single_blocks)
        num_kv = keys.shape[1]
        if self._single_mask is None:
            zero = torch.zeros(self._single_beyond.shape, dtype=q.dtype, device=q.device)
            self._single_mask = zero.masked_fill_(self._single_beyond, float("-inf"))
        grouped = torch.unflatten(q, 1, (num_kv, -1))  # the heads that share keys become rows of one query
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._single_mask)
        return out.flatten(1)

    def _attend_chunk(self, layer: int, q: Tensor, chunk: _Chunk) -> Tensor:
        keys, values = self._cache.gather(layer, chunk.blocks)
        keys, values = keys[:, :, : chunk.num_keys], values[:, :, : chunk.num_keys]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


def cache_rows(plan: StepPlan, positions: Int64, block_size: int) -> Int64:
    """Flat cache row of every token of the plan."""
    owner = np.repeat(np.arange(plan.num_sequences), np.diff(plan.offsets))
    blocks: Int32 = plan.block_tables[0][owner, positions // block_size]
    return blocks.astype(np.int64) * block_size + positions % block_size


class TiledAttention:
    """The deterministic way: one sequence and one aligned tile of TILE_ROWS positions at a time.

    Tile t holds positions TILE_ROWS * t onward and sees the keys of positions 0 .. TILE_ROWS * (t + 1) - 1, causally.
    A position always stands in the same row of a computation of the same shape, however the step was put together.
    """

    def __init__(self, cache: PagedCache, plan: StepPlan, positions: Int64, device: torch.device) -> None:
        self._cache = cache
        self._rows = torch.from_numpy(cache_rows(plan, positions, cache.block_size)).to(device)
        self._tiles = [tile for i in range(plan.num_sequences) for tile in self._tiles_of(plan, i, device)]

    def _tiles_of(self, plan: StepPlan, i: int, device: torch.device) -> list[tuple[slice, slice, Tensor, Tensor]]:
        """(rows of the step, rows of the tile, blocks, mask) for each tile that the sequence touches."""
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
            visible = torch.arange(num_keys) <= torch.arange(tile * TILE_ROWS, num_keys)[:, None]
            tiles.append(
                (
                    slice(start + low - first, start + high - first),
                    slice(low - tile * TILE_ROWS, high - tile * TILE_ROWS),
                    torch.from_numpy(padded)[None].to(device),
                    visible.to(device),
                )
            )
        return tiles

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See model.Attend."""
        self._cache.write(layer, self._rows, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for rows, places, blocks, visible in self._tiles:
            tile = q.new_zeros(TILE_ROWS, *q.shape[1:])
            tile[places] = q[rows]
            out[rows] = self._attend(layer, tile, blocks, visible)[places]
        return out.flatten(1)

    def _attend(self, layer: int, tile: Tensor, blocks: Tensor, visible: Tensor) -> Tensor:
        num_keys = visible.shape[1]
        keys, values = (t[0, :, :num_keys].contiguous() for t in self._cache.gather(layer, blocks))
        num_kv, head_dim = keys.shape[0], keys.shape[2]
        grouped = (
            torch.unflatten(tile, 1, (num_kv, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        )  # (kv, group * tile, head_dim)
        scores = torch.bmm(grouped, keys.transpose(1, 2)) * head_dim**-0.5
        scores = torch.unflatten(scores, 1, (-1, TILE_ROWS)).masked_fill(~visible, float("-inf"))
        out = torch.bmm(torch.softmax(scores, -1).flatten(1, 2), values)
        return torch.unflatten(out, 1, (-1, TILE_ROWS)).permute(2, 0, 1, 3).flatten(1, 2)

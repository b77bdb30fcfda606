"""The paged KV memory. A layer's cache is (num_blocks, block_size, 2, kv heads, head_dim): keys and values of a token
side by side, so one gather fetches both."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inferloop.core.shape import ModelShape
from inferloop.engine.schedule.step import Int32, UInt8


class PagedCache:
    """The KV blocks of all layers. Zeroed, so that what is masked away is finite."""

    def __init__(
        self, shape: ModelShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size, self.dtype = block_size, dtype
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

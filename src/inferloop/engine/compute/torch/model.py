"""A decoder over the rows of a step, put together as its header's structure says.

Everything but attention treats rows one by one. In deterministic mode those parts run in tiles of exactly TILE_ROWS
rows (zero rows fill the last), so that the kernels see one shape whatever the batch is, and a row's result does not
depend on how many neighbours it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from inferloop.core.shape import ModelShape
from inferloop.engine.compute.torch.group import ALONE, Group
from inferloop.engine.compute.torch.layers.low_rank import Adapted
from inferloop.engine.compute.torch.layers.rope import apply_rope
from inferloop.engine.compute.torch.weights import LayerWeights, ModelWeights
from inferloop.models.headers import Structure

TILE_ROWS = 16


class Attend(Protocol):
    """Stores the rows' keys and values of a layer and returns their attention, (rows, heads * head_dim)."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Turns:
    """What the rows' queries and keys are rotated by: cos and sin, each (rows, 1, rotated dimensions). `local`: those
    of layers with a window, where they have their own."""

    all: tuple[Tensor, Tensor]
    local: tuple[Tensor, Tensor] | None = None

    def padded(self, num_rows: int) -> Turns:
        """With so many rows of zeros more."""

        def pad(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return F.pad(pair[0], (0, 0, 0, 0, 0, num_rows)), F.pad(pair[1], (0, 0, 0, 0, 0, num_rows))

        return Turns(pad(self.all), None if self.local is None else pad(self.local))


def softcapped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else torch.tanh(x / cap) * cap


class Decoder:
    """Pure function of its weights; keeps no state between calls."""

    def __init__(
        self, weights: ModelWeights, shape: ModelShape, structure: Structure, *, tiled: bool, group: Group = ALONE
    ) -> None:
        """`weights` and `shape` are those of this rank's share of the model that `group` has."""
        self._group = group
        self._weights, self._shape, self._structure, self._tiled = weights, shape, structure, tiled
        self._num_q, self._num_kv = shape.num_heads, shape.kv_heads[0]
        self._in_buckets = weights.head.packed

    def hidden(
        self,
        token_ids: Tensor,
        turns: Turns,
        attend: Attend,
        between: Callable[[], None],
        adapted: Sequence[Adapted | None],
    ) -> Tensor:
        """Last hidden states before the final norm, (rows, hidden). `between` is called between parts of the work, and
        may end it by raising. `adapted`: of the rows, or when tiled of every TILE_ROWS of them."""
        num_rows = len(token_ids)
        if padding := self._num_padding_rows(num_rows):
            token_ids = F.pad(token_ids, (0, padding))
            turns = turns.padded(padding)
        x = self._group.embed(token_ids, self._weights.embedding)
        if self._structure.embedding_scale != 1.0:
            x = x * torch.tensor(self._structure.embedding_scale, dtype=x.dtype)
        for i, layer in enumerate(self._weights.layers):
            between()
            cos, sin = turns.local if turns.local is not None and self._structure.is_local(i) else turns.all
            qkv = self._adapted(lambda *rows, layer=layer: self._qkv(layer, *rows), adapted, x, cos, sin)
            q, k, v = torch.split(qkv, [self._num_q, self._num_kv, self._num_kv], 1)
            attended = attend(i, q[:num_rows], k[:num_rows], v[:num_rows])
            between()
            if padding:
                attended = F.pad(attended, (0, 0, 0, padding))
            x = self._adapted(lambda *rows, layer=layer: self._finish(layer, *rows), adapted, x, attended)
        return x[:num_rows]

    def normed(self, hidden: Tensor) -> Tensor:
        """What `hidden` returns after the final norm, same shape."""
        num_rows = len(hidden)
        if self._tiled:
            hidden = F.pad(hidden, (0, 0, 0, -num_rows % TILE_ROWS))
        return self._rowwise(self._weights.norm, hidden)[:num_rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab) in the weights' dtype."""
        num_rows = len(hidden)
        if self._tiled:
            hidden = F.pad(hidden, (0, 0, 0, -num_rows % TILE_ROWS))
        return self._rowwise(self._head, hidden)[:num_rows]

    def _num_padding_rows(self, num_rows: int) -> int:
        """Rows of zeros to add: to whole tiles, or where each row count costs memory for good, to one of a few."""
        if self._tiled:
            return -num_rows % TILE_ROWS
        if not self._in_buckets or num_rows <= 32:
            return 0
        return -num_rows % (4 if num_rows <= 64 else 8)

    def _rowwise(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        if not self._tiled or len(rows[0]) == TILE_ROWS:
            return function(*rows)
        return torch.cat([function(*tile) for tile in zip(*(torch.split(r, TILE_ROWS) for r in rows), strict=True)])

    def _adapted(self, function: Callable[..., Tensor], adapted: Sequence[Adapted | None], *rows: Tensor) -> Tensor:
        """`_rowwise` of a function that is told, before the rows, through which adapters they go."""
        of_tiles = iter(adapted)
        return self._rowwise(lambda *tile: function(next(of_tiles), *tile), *rows)

    def _qkv(self, layer: LayerWeights, adapted: Adapted | None, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(rows, q heads + 2 * kv heads, head_dim): queries and keys rotated, values as they are."""
        qkv: Tensor = torch.unflatten(layer.qkv(layer.input_norm(x), adapted), -1, (-1, self._shape.head_dim))
        num_rotated = self._num_q + self._num_kv
        rotated = qkv[:, :num_rotated]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = torch.split(rotated, [self._num_q, self._num_kv], 1)
            rotated = torch.cat([layer.q_norm(q), layer.k_norm(k)], 1)
        qkv[:, :num_rotated] = apply_rope(rotated, cos, sin)
        return qkv

    def _finish(self, layer: LayerWeights, adapted: Adapted | None, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residual, feed-forward, residual."""
        projected = self._group.sum(layer.out(attended, adapted))
        x = x + (projected if layer.attended_norm is None else layer.attended_norm(projected))
        fed = self._group.sum(layer.feed_forward(layer.ffn_norm(x), adapted))
        return x + (fed if layer.ffn_out_norm is None else layer.ffn_out_norm(fed))

    def _head(self, hidden: Tensor) -> Tensor:
        logits = self._group.whole_logits(self._weights.head(self._weights.norm(hidden)))
        return softcapped(logits, self._structure.final_softcap)

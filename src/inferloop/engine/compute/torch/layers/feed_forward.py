"""What follows attention in a layer: a gated unit, or a choice of several."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from inferloop.engine.compute.torch.layers.linear import Linear
from inferloop.engine.compute.torch.layers.low_rank import Adapted
from inferloop.models.headers.structure import Activation


class FeedForward(Protocol):
    """(rows, hidden) -> (rows, hidden)."""

    def __call__(self, x: Tensor, adapted: Adapted | None = None) -> Tensor: ...


class Mlp:
    """down(activation(gate(x)) * up(x)); `gate_up` stacks the two."""

    __slots__ = ("_activation", "down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self.gate_up, self.down, self._activation = gate_up, down, activation

    @property
    def packed(self) -> bool:
        return self.gate_up.packed

    def __call__(self, x: Tensor, adapted: Adapted | None = None) -> Tensor:
        gate, up = self.gate_up(x, adapted).chunk(2, -1)
        gate = F.silu(gate) if self._activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.down(gate * up, adapted)


class Experts:
    """Each row goes through the `per_token` of these that a softmax over all likes best; their results are added with
    its values as weights, those made to sum to 1 or not. They are added in the order of the experts.

    `whole`: an expert computes all rows and those that did not choose it are left out, so that what it computes has one
    shape, whoever else is there.
    """

    def __init__(self, router: Linear, experts: list[Mlp], per_token: int, *, renormalized: bool, whole: bool) -> None:
        self._router, self._experts, self._per_token = router, experts, per_token
        self._renormalized, self._whole = renormalized, whole

    def __call__(self, x: Tensor, adapted: Adapted | None = None) -> Tensor:
        """Adapters change no expert."""
        chosen, weights = torch.softmax(self._router(x), -1, dtype=torch.float).topk(self._per_token, -1)[::-1]
        if self._renormalized:
            weights = weights / weights.sum(-1, keepdim=True)
        of_expert = x.new_zeros(len(x), len(self._experts), dtype=torch.float).scatter_(1, chosen, weights)
        out = torch.zeros_like(x)
        for e in torch.unique(chosen).tolist():
            weight = of_expert[:, e, None].to(x.dtype)
            if self._whole:
                out = out + self._experts[e](x) * weight
            else:
                rows = torch.nonzero(of_expert[:, e])[:, 0]
                out.index_add_(0, rows, self._some(self._experts[e], x[rows]) * weight[rows])
        return out

    def _some(self, expert: Mlp, x: Tensor) -> Tensor:
        """Each row count that packed weights meet costs memory for good, so there are few."""
        if not expert.packed:
            return expert(x)
        num_rows = len(x)
        filled = 1 << (num_rows - 1).bit_length() if num_rows <= 16 else -(-num_rows // 16) * 16
        return expert(F.pad(x, (0, 0, 0, filled - num_rows)))[:num_rows]

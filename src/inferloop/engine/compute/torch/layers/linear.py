"""Matrix times rows. On CPU in bf16 the matrix is packed once, for otherwise oneDNN repacks it in every call."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from inferloop.engine.compute.torch.layers.low_rank import Adapted, LowRank


class Linear:
    """y = x @ weight.T + bias for x (rows, in) and weight (out, in), and what the adapters of some rows add to them.

    `updates`, by slot, are the adapters that change this matrix. The other rows are computed as if there were none."""

    __slots__ = ("_bias", "_weight", "num_bytes", "packed", "updates")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        tensors = [weight] if bias is None else [weight, bias]
        self.num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        self.packed = packs(weight.device, weight.dtype)
        """oneDNN then compiles code for every row count that it meets and keeps it, half a megabyte each."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight
        self._bias = bias
        self.updates: dict[int, LowRank] = {}

    def __call__(self, x: Tensor, adapted: Adapted | None = None) -> Tensor:
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = F.linear(x, self._weight, self._bias)
        return y if adapted is None else adapted.add(self.updates, x, y)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether such a matrix is kept packed, and not as it is given."""
    return device.type == "cpu" and dtype == torch.bfloat16 and torch._C._has_mkldnn

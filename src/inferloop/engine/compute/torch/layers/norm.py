"""Root mean square norm (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


class Norm:
    """Of the last dimension, times a gain (size,). A gain in fp32 beside rows in less: rounded once, at the end."""

    __slots__ = ("_eps", "_gain", "num_bytes")

    def __init__(self, gain: Tensor, eps: float) -> None:
        self._gain, self._eps = gain, eps
        self.num_bytes = gain.numel() * gain.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        gain = self._gain
        if gain.dtype == x.dtype:
            return F.rms_norm(x, gain.shape, gain, self._eps)
        return F.rms_norm(x.to(gain.dtype), gain.shape, gain, self._eps).to(x.dtype)

"""Model files -> tensors ready to multiply with: dequantized, q/k in half-split order, QKV and gate/up merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.stored import half_split, read_tensor
from inferloop.engine.compute.torch.linear import Linear
from inferloop.models.headers import ModelHeader

Progress = Callable[[int, int], None]
"""(weight tensors read, of how many)."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. `qkv` stacks q, k, v; `gate_up` stacks gate, up."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`rope_factors`: fp32 divisors of the inverse frequencies. `num_bytes` counts every weight of the files once,
    in the computing precision; a tied embedding that is packed for the head is held twice."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear
    rope_factors: Tensor | None
    num_bytes: int


def load_weights(
    header: ModelHeader, *, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> ModelWeights:
    """Reads by memory map, one tensor at a time, so the peak is the result and one fp32 tensor.

    Raises ModelFileError for a stored format that cannot be read or a layer structure that this runner has not.
    """
    shape = header.shape
    if len(set(shape.kv_heads)) > 1:
        raise ModelFileError("the torch runner needs the same number of KV heads in every layer")
    reader = _Reader(header, dtype, device, progress)
    layers = tuple(_layer(reader, f"model.layers.{i}.") for i in range(shape.num_layers))
    embedding = reader.tensor("model.embed_tokens.weight")
    norm = reader.tensor("model.norm.weight")
    head = Linear(embedding if shape.tied_embeddings else reader.tensor("lm_head.weight"))
    factors = header.rope.factors_tensor
    return ModelWeights(
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        rope_factors=torch.from_numpy(read_tensor(header.tensors[factors])).to(device) if factors else None,
        num_bytes=reader.num_bytes,
    )


def _layer(reader: _Reader, prefix: str) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
    gate_up = [mlp + name for name in ("gate_proj", "up_proj")]
    return LayerWeights(
        input_norm=reader.tensor(prefix + "input_layernorm.weight"),
        qkv=reader.linear(*qkv),
        q_norm=reader.optional(attention + "q_norm.weight"),
        k_norm=reader.optional(attention + "k_norm.weight"),
        out=reader.linear(attention + "o_proj"),
        post_norm=reader.tensor(prefix + "post_attention_layernorm.weight"),
        gate_up=reader.linear(*gate_up),
        down=reader.linear(mlp + "down_proj"),
    )


class _Reader:
    def __init__(
        self, header: ModelHeader, dtype: torch.dtype, device: torch.device, progress: Progress | None
    ) -> None:
        self._tensors, self._head_dim = header.tensors, header.shape.head_dim
        self._dtype, self._device = dtype, device
        self._progress, self._num_read = progress, 0
        self.num_bytes = 0

    def tensor(self, name: str) -> Tensor:
        info = self._tensors[name]
        values = torch.from_numpy(half_split(read_tensor(info), info, self._head_dim))
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, len(self._tensors))
        converted = values.to(device=self._device, dtype=self._dtype)
        self.num_bytes += converted.numel() * converted.element_size()
        return converted

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self._tensors else None

    def linear(self, *names: str) -> Linear:
        """The modules of these names stacked; a bias that only some of them have is zero in the others."""
        weights = [self.tensor(name + ".weight") for name in names]
        biases = [self.optional(name + ".bias") for name in names]
        stacked = weights[0] if len(weights) == 1 else torch.cat(weights)
        if all(bias is None for bias in biases):
            return Linear(stacked)
        filled = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        return Linear(stacked, torch.cat(filled))

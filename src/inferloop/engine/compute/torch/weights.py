"""Model files -> tensors ready to multiply with: dequantized, q/k in half-split order, QKV and gate/up merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.stored import half_split, read_tensor
from inferloop.engine.compute.torch.layers.feed_forward import Experts, FeedForward, Mlp
from inferloop.engine.compute.torch.layers.linear import Linear
from inferloop.engine.compute.torch.layers.norm import Norm
from inferloop.models.headers import ModelHeader
from inferloop.models.headers.structure import Activation

Progress = Callable[[int, int], None]
"""(weight tensors read, of how many)."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. `qkv` stacks q, k, v. The norms of what comes out are None where a model has none."""

    input_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    out: Linear
    attended_norm: Norm | None
    ffn_norm: Norm
    feed_forward: FeedForward
    ffn_out_norm: Norm | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`rope_factors`: fp32 divisors of the inverse frequencies. `num_bytes` counts every weight of the files once,
    in the computing precision; a tied embedding that is packed for the head is held twice."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Linear
    rope_factors: Tensor | None
    num_bytes: int


def load_weights(
    header: ModelHeader,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tiled: bool = False,
    progress: Progress | None = None,
) -> ModelWeights:
    """Reads one tensor at a time, so the peak is the result and one fp32 tensor. `tiled`: for deterministic mode.

    Raises ModelFileError for a stored format that cannot be read or a layer structure that this runner has not.
    """
    shape = header.shape
    if len(set(shape.kv_heads)) > 1:
        raise ModelFileError("the torch runner needs the same number of KV heads in every layer")
    reader = _Reader(header, dtype, device, progress)
    layers = tuple(_layer(reader, header, i, tiled) for i in range(shape.num_layers))
    embedding = reader.tensor("model.embed_tokens.weight")
    norm = reader.norm("model.norm")
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


def _layer(reader: _Reader, header: ModelHeader, i: int, tiled: bool) -> LayerWeights:
    prefix = f"model.layers.{i}."
    attention, after = prefix + "self_attn.", prefix + "post_attention_layernorm"
    has_output_norms = header.structure.output_norms
    return LayerWeights(
        input_norm=reader.norm(prefix + "input_layernorm"),
        qkv=reader.linear(*(attention + name for name in ("q_proj", "k_proj", "v_proj"))),
        q_norm=reader.optional_norm(attention + "q_norm"),
        k_norm=reader.optional_norm(attention + "k_norm"),
        out=reader.linear(attention + "o_proj"),
        # The name is older than the norm it fits.
        attended_norm=reader.norm(after) if has_output_norms else None,
        ffn_norm=reader.norm(prefix + "pre_feedforward_layernorm" if has_output_norms else after),
        feed_forward=_feed_forward(reader, header, i, tiled),
        ffn_out_norm=reader.norm(prefix + "post_feedforward_layernorm") if has_output_norms else None,
    )


def _feed_forward(reader: _Reader, header: ModelHeader, i: int, tiled: bool) -> FeedForward:
    prefix, experts = f"model.layers.{i}.mlp.", header.shape.experts
    if experts is None or i not in experts.layers:
        return _mlp(reader, prefix, header.structure.activation)
    router = reader.linear(prefix + "gate")
    mlps = [_mlp(reader, f"{prefix}experts.{e}.", header.structure.activation) for e in range(experts.num)]
    renormalized = header.structure.renormalized_experts
    return Experts(router, mlps, experts.per_token, renormalized=renormalized, whole=tiled)


def _mlp(reader: _Reader, prefix: str, activation: Activation) -> Mlp:
    gate_up = reader.linear(prefix + "gate_proj", prefix + "up_proj")
    return Mlp(gate_up, reader.linear(prefix + "down_proj"), activation)


class _Reader:
    def __init__(
        self, header: ModelHeader, dtype: torch.dtype, device: torch.device, progress: Progress | None
    ) -> None:
        self._tensors, self._head_dim = header.tensors, header.shape.head_dim
        self._structure, self._eps = header.structure, header.norm_eps
        self._dtype, self._device = dtype, device
        self._progress, self._num_read = progress, 0
        self.num_bytes = 0

    def tensor(self, name: str) -> Tensor:
        return self._placed(self._values(name), self._dtype)

    def norm(self, name: str) -> Norm:
        gain = self._values(name + ".weight") + self._structure.norm_offset
        return Norm(self._placed(gain, torch.float32 if self._structure.fp32_norms else self._dtype), self._eps)

    def optional_norm(self, name: str) -> Norm | None:
        return self.norm(name) if name + ".weight" in self._tensors else None

    def _values(self, name: str) -> Tensor:
        info = self._tensors[name]
        values = torch.from_numpy(half_split(read_tensor(info), info, self._head_dim))
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, len(self._tensors))
        return values

    def _placed(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        converted = values.to(device=self._device, dtype=dtype)
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

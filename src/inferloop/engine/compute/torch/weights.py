"""Model files -> tensors ready to multiply with: dequantized, q/k in half-split order, QKV and gate/up merged.

Rows are read, converted and put where they belong a few at a time, so that loading takes little beyond the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import Product
from inferloop.engine.compute.stored import half_split, read_tensor, unchanged
from inferloop.engine.compute.torch.layers.feed_forward import Experts, FeedForward, Mlp
from inferloop.engine.compute.torch.layers.linear import Linear, packs
from inferloop.engine.compute.torch.layers.norm import Norm
from inferloop.models.headers import ModelHeader, TensorInfo
from inferloop.models.headers.structure import Activation

_Held = TypeVar("_Held", Linear, Norm)
Progress = Callable[[int, int], None]
"""(bytes of weights read, of how many)."""

_CHUNK_WEIGHTS = 1 << 17
"""Converted at once, in the processor's cache."""


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

    @property
    def products(self) -> dict[Product, Linear]:
        """Those that adapters can change: not the experts."""
        found: dict[Product, Linear] = {"qkv": self.qkv, "out": self.out}
        if isinstance(self.feed_forward, Mlp):
            found |= {"gate_up": self.feed_forward.gate_up, "down": self.feed_forward.down}
        return found


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`rope_factors`: fp32 divisors of the inverse frequencies. `num_bytes` counts what is held: a tied embedding that
    is packed for the head is held twice."""

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
    """The peak is the result and a few rows, or where matrices are packed the largest of a layer. `tiled`: for
    deterministic mode.

    Raises ModelFileError for a stored format that cannot be read, a layer structure that this runner has not, or files
    that are written to meanwhile.
    """
    if len(set(header.shape.kv_heads)) > 1:
        raise ModelFileError("the torch runner needs the same number of KV heads in every layer")
    with unchanged(header):
        return _read_all(_Reader(header, dtype, device, progress), header, tiled)


def _read_all(reader: _Reader, header: ModelHeader, tiled: bool) -> ModelWeights:
    """The head, which may be larger than all the layers and is there twice while it is packed, comes first, when
    nothing else is held."""
    shape = header.shape
    if shape.tied_embeddings:
        embedding = reader.matrix("model.embed_tokens.weight")
        head = Linear(embedding)
    else:
        head = Linear(reader.matrix("lm_head.weight"))
        embedding = reader.matrix("model.embed_tokens.weight")
    num_shared = embedding.nbytes if shape.tied_embeddings and not head.packed else 0
    layers = tuple(_layer(reader, header, i, tiled) for i in range(shape.num_layers))
    norm = reader.norm("model.norm")
    factors = header.rope.factors_tensor
    return ModelWeights(
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        rope_factors=reader.values(factors).to(embedding.device) if factors else None,
        num_bytes=reader.num_bytes + head.num_bytes + embedding.nbytes - num_shared,
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
    """`num_bytes`: what is held of what was read so far, but for what `matrix` gave."""

    def __init__(
        self, header: ModelHeader, dtype: torch.dtype, device: torch.device, progress: Progress | None
    ) -> None:
        self._tensors, self._head_dim = header.tensors, header.shape.head_dim
        self._structure, self._eps = header.structure, header.norm_eps
        self._dtype, self._device = dtype, device
        self._progress, self._num_read = progress, 0
        self._num_to_read = sum(info.num_bytes for info in header.tensors.values())
        self._to_pack = torch.empty(0, device=device, dtype=dtype)
        self.num_bytes = 0

    def matrix(self, name: str) -> Tensor:
        return self._stacked(name)

    def values(self, name: str) -> Tensor:
        """fp32, in memory of the host."""
        return self._read(self._tensors[name])

    def vector(self, name: str) -> Tensor:
        return self.values(name).to(device=self._device, dtype=self._dtype)

    def norm(self, name: str) -> Norm:
        gain = self.values(name + ".weight") + self._structure.norm_offset
        dtype = torch.float32 if self._structure.fp32_norms else self._dtype
        return self._held(Norm(gain.to(device=self._device, dtype=dtype), self._eps))

    def optional_norm(self, name: str) -> Norm | None:
        return self.norm(name) if name + ".weight" in self._tensors else None

    def linear(self, *names: str) -> Linear:
        """The modules of these names stacked; a bias that only some of them have is zero in the others."""
        weights = [name + ".weight" for name in names]
        biases = [self.vector(name + ".bias") if name + ".bias" in self._tensors else None for name in names]
        bias = None
        if any(b is not None for b in biases):
            lengths = [self._tensors[name].shape[0] for name in weights]
            empty = torch.zeros(max(lengths), device=self._device, dtype=self._dtype)
            bias = torch.cat([empty[:n] if b is None else b for n, b in zip(lengths, biases, strict=True)])
        return self._held(Linear(self._stacked(*weights, kept=not packs(self._device, self._dtype)), bias))

    def _held(self, made: _Held) -> _Held:
        self.num_bytes += made.num_bytes
        return made

    def _stacked(self, *names: str, kept: bool = True) -> Tensor:
        infos = [self._tensors[name] for name in names]
        num_rows, num_columns = sum(info.shape[0] for info in infos), infos[0].shape[1]
        out = self._room(num_rows, num_columns, kept)
        begin = 0
        with _one_thread():
            for info in infos:
                for part in _rows_at_once(info):
                    out[begin : begin + part.shape[0]] = self._read(part)
                    begin += part.shape[0]
        return out

    def _room(self, num_rows: int, num_columns: int, kept: bool) -> Tensor:
        """For a matrix. Those that are packed next, and not kept, lie in one place one after the other: as pieces of
        many sizes that come and go between others they would leave the heap full of holes."""
        num = num_rows * num_columns
        if kept:
            return torch.empty(num_rows, num_columns, device=self._device, dtype=self._dtype)
        if self._to_pack.numel() < num:
            self._to_pack = torch.empty(num, device=self._device, dtype=self._dtype)
        return self._to_pack[:num].view(num_rows, num_columns)

    def _read(self, info: TensorInfo) -> Tensor:
        values = torch.from_numpy(half_split(read_tensor(info), info, self._head_dim))
        self._num_read += info.num_bytes
        if self._progress is not None:
            self._progress(self._num_read, self._num_to_read)
        return values


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For copies that are too small to be shared: torch's threads would spin while they wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rows_at_once(info: TensorInfo) -> Iterator[TensorInfo]:
    """A matrix in parts; interleaved heads stay whole."""
    num_rows, num_columns = info.shape
    unit = num_rows // info.interleaved_heads if info.interleaved_heads else 1
    step = max(_CHUNK_WEIGHTS // (num_columns * unit), 1) * unit
    return (info.part(slice(begin, begin + step)) for begin in range(0, num_rows, step))

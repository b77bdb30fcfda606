"""Which tensors a decoder has, and that a file has them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import ModelShape
from inferloop.models.headers.header import TensorInfo
from inferloop.models.headers.structure import Structure

Shapes = dict[str, tuple[int, ...]]

_UNREAD = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tables that older checkpoints keep beside the weights."""


def check_tensors(file: Path, shape: ModelShape, structure: Structure, tensors: Mapping[str, TensorInfo]) -> None:
    """Every weight of the structure is there with the right shape, and so is a bias or q/k norm if it is there. A layer
    has no other: what nobody reads would have changed the numbers. Raises ModelFileError naming the first that is
    wrong."""
    experts = shape.experts
    num_least = shape.num_layers + (3 * experts.num * len(experts.layers) if experts else 0)
    if num_least > len(tensors):  # before anything of that length is built
        raise ModelFileError(f"{file}: has {len(tensors)} tensors, its header implies {num_least} at least")
    expected = expected_shapes(shape, structure)
    for name in expected:
        if name not in tensors:
            raise ModelFileError(f"{file}: tensor {name} is missing")
    known = {**expected, **_optional_shapes(shape, expected)}
    for name, want in known.items():
        info = tensors.get(name)
        if info is not None and info.shape != want:
            raise ModelFileError(f"{file}: tensor {name} has shape {info.shape}, the header implies {want}")
    for name in tensors:
        if name.startswith("model.layers.") and name not in known and not _UNREAD.search(name):
            raise ModelFileError(f"{file}: tensor {name} is none that a {shape.architecture} model has here")


def expected_shapes(shape: ModelShape, structure: Structure) -> Shapes:
    """Names and shapes of the weights that have to be there (biases left out)."""
    h = shape.hidden_size
    out: Shapes = {"model.embed_tokens.weight": (shape.vocab_size, h), "model.norm.weight": (h,)}
    if not shape.tied_embeddings:
        out["lm_head.weight"] = (shape.vocab_size, h)
    for i in range(shape.num_layers):
        out.update((f"model.layers.{i}.{name}.weight", want) for name, want in _layer(shape, structure, i))
    return out


def _layer(shape: ModelShape, structure: Structure, i: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.kv_heads[i] * shape.head_dim
    yield "input_layernorm", (h,)
    yield "post_attention_layernorm", (h,)
    if structure.output_norms:
        yield "pre_feedforward_layernorm", (h,)
        yield "post_feedforward_layernorm", (h,)
    if kv:
        yield "self_attn.q_proj", (q, h)
        yield "self_attn.k_proj", (kv, h)
        yield "self_attn.v_proj", (kv, h)
        yield "self_attn.o_proj", (h, q)
        if structure.qk_norms:
            yield "self_attn.q_norm", (shape.head_dim,)
            yield "self_attn.k_norm", (shape.head_dim,)
    experts = shape.experts
    if experts is None or i not in experts.layers:
        yield from _mlp("mlp.", h, shape.ffn_size)
        return
    yield "mlp.gate", (experts.num, h)
    for e in range(experts.num):
        yield from _mlp(f"mlp.experts.{e}.", h, experts.ffn_size)


def _mlp(prefix: str, h: int, ffn: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj", (ffn, h)
    yield prefix + "up_proj", (ffn, h)
    yield prefix + "down_proj", (h, ffn)


def _optional_shapes(shape: ModelShape, expected: Shapes) -> Shapes:
    """Biases of the dense products; norms of queries and keys."""
    out: Shapes = {
        name.removesuffix("weight") + "bias": want[:1]
        for name, want in expected.items()
        if name.startswith("model.layers.") and len(want) == 2 and ".experts." not in name and ".mlp.gate." not in name
    }
    for i in range(shape.num_layers):
        out |= {f"model.layers.{i}.self_attn.{part}_norm.weight": (shape.head_dim,) for part in "qk"}
    return out

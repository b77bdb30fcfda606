"""Who computes what: the share that each rank has of a model, and where that lies in the model's files."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from inferloop.core.errors import UsageError
from inferloop.models.headers import ModelHeader, TensorInfo
from inferloop.models.headers.dtypes import block_of

_LAYER = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+)\.(weight|bias)")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Share:
    """What rank `rank` of `size` has: heads, KV heads, inner units of the feed-forward, tokens of the vocabulary."""

    rank: int
    size: int
    heads: range
    kv_heads: range
    ffn: range
    vocab: range


def even(num: int, part: int, num_parts: int, unit: int = 1) -> range:
    """Part `part` of 0 .. num - 1, cut into parts whose sizes differ by one `unit` at most. The first is one of the
    smaller ones: that rank has more to do than compute."""
    units = num // unit
    begin, end = units * part // num_parts, units * (part + 1) // num_parts
    return range(begin * unit, num if part == num_parts - 1 else end * unit)


def check_kind(device: str, size: int) -> None:
    """Raises UsageError for a device that ranks cannot have one each of."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--tensor-parallel-size {size} is for --device cpu, or cuda, of which each rank takes one")


def share_of(header: ModelHeader, rank: int, size: int) -> Share:
    """Whole groups of the heads that share keys and values, so that each of those is kept once; with more ranks than
    groups, each rank has a part of one group, and what that shares is kept by several ranks. Where a count cannot be
    cut evenly the shares differ by one.

    Raises UsageError for a model or a number of ranks that cannot be split.
    """
    shape = header.shape
    if shape.experts is not None:
        raise UsageError(f"--tensor-parallel-size {size}: {shape.architecture} has experts, which are not split here")
    if len(set(shape.kv_heads)) > 1:
        raise UsageError(f"--tensor-parallel-size {size}: this model's layers have different numbers of KV heads")
    num_kv, unit = shape.kv_heads[0], _ffn_unit(header)
    most = min(shape.num_heads, shape.ffn_size // unit, shape.vocab_size)
    if not 1 <= size <= most:
        what = f"{shape.num_heads} heads and {shape.ffn_size // unit} units of the feed-forward"
        raise UsageError(f"--tensor-parallel-size {size}: a model with {what} can be split over 1 to {most} ranks")
    each = shape.num_heads // num_kv
    if size <= num_kv:
        kv_heads = even(num_kv, rank, size)
        heads = range(kv_heads.start * each, kv_heads.stop * each)
    else:
        kv = rank * num_kv // size
        ranks = [r for r in range(size) if r * num_kv // size == kv]
        own = even(each, ranks.index(rank), len(ranks))
        kv_heads, heads = range(kv, kv + 1), range(kv * each + own.start, kv * each + own.stop)
    return Share(
        rank, size, heads, kv_heads, even(shape.ffn_size, rank, size, unit), even(shape.vocab_size, rank, size)
    )


def _ffn_unit(header: ModelHeader) -> int:
    """How many neighbouring columns of the down projections cannot be parted: those of a quantized block."""
    downs = (f"model.layers.{i}.mlp.down_proj.weight" for i in range(header.shape.num_layers))
    return max((block_of(header.tensors[name].dtype)[0] for name in downs if name in header.tensors), default=1)


def header_of_share(header: ModelHeader, share: Share) -> ModelHeader:
    """The share as if it were a model: the counts that it has, and of each tensor the part of the file that it is.

    Raises ModelFileError for a quantized format whose blocks lie across two ranks' columns.
    """
    shape = header.shape
    local = replace(
        shape,
        num_heads=len(share.heads),
        num_kv_heads=len(share.kv_heads),
        kv_heads_per_layer=None if shape.kv_heads_per_layer is None else (len(share.kv_heads),) * shape.num_layers,
        ffn_size=len(share.ffn),
        vocab_size=len(share.vocab),
    )
    parts = ((name, _part(name, info, share, shape.head_dim)) for name, info in header.tensors.items())
    return replace(header, shape=local, tensors={name: part for name, part in parts if part is not None})


def _part(name: str, info: TensorInfo, share: Share, head_dim: int) -> TensorInfo | None:
    if name in _VOCABULARY:
        return info.part(_slice(share.vocab))
    found = _LAYER.fullmatch(name)
    if found is None:
        return info
    module, kind = found.groups()
    by_module = {
        "q_proj": _slice(share.heads, head_dim),
        "k_proj": _slice(share.kv_heads, head_dim),
        "v_proj": _slice(share.kv_heads, head_dim),
        "gate_proj": _slice(share.ffn),
        "up_proj": _slice(share.ffn),
    }
    if module in by_module:
        return info.part(by_module[module])
    inputs = {"o_proj": _slice(share.heads, head_dim), "down_proj": _slice(share.ffn)}
    if module not in inputs:  # norms of queries and keys, which all heads share
        return info
    if kind == "bias":  # counts once in the sum
        return info if share.rank == 0 else None
    return info.part(columns=inputs[module])


def _slice(part: range, each: int = 1) -> slice:
    return slice(part.start * each, part.stop * each)

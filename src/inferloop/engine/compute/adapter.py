"""An adapter's matrices in memory, and how they come together where a runner keeps several matrices as one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import Product
from inferloop.engine.compute.stored import read_tensor
from inferloop.engine.schedule.step import Float32
from inferloop.models.adapters.read import AdapterHeader
from inferloop.models.headers import ModelHeader
from inferloop.models.headers.tensors import expected_shapes

PARTS: dict[Product, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The products of a layer, and the modules whose outputs each of them has, in this order."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """b @ a is added to a matrix; a (rank, in), b (out, rank), its scaling in it."""

    a: Float32
    b: Float32


@dataclass(frozen=True, slots=True)
class Adapter:
    """`updates` by module, like model.layers.0.self_attn.q_proj. `digest`: sha256 hex over all that is computed with,
    and nothing else; neither name nor place count."""

    digest: str
    rank: int
    updates: Mapping[str, LowRank]
    num_bytes: int


def load_adapter(header: AdapterHeader) -> Adapter:
    """Read the matrices. Raises ModelFileError for files that cannot be read and for numbers that are not finite."""
    updates, digest = dict[str, LowRank](), hashlib.sha256()
    for module in sorted(header.pairs):
        pair = header.pairs[module]
        a, b = read_tensor(pair.a), read_tensor(pair.b)
        with np.errstate(over="ignore"):
            b *= np.float32(pair.scaling)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ModelFileError(f"{pair.a.file}: {module} has numbers that are not finite")
        updates[module] = LowRank(a, b)
        digest.update(f"{module} {a.shape} {b.shape}\n".encode())
        digest.update(a.astype("<f4", copy=False).tobytes())
        digest.update(b.astype("<f4", copy=False).tobytes())
    num_bytes = sum(update.a.nbytes + update.b.nbytes for update in updates.values())
    return Adapter(digest.hexdigest(), header.rank, updates, num_bytes)


def merged(adapter: Adapter, model: ModelHeader) -> dict[tuple[int, Product], LowRank]:
    """By layer and product. Where several modules share one, a has the rows of all and b its blocks on the diagonal:
    each output has its own rank's share of them, and zeros for the rest."""
    shapes = expected_shapes(model.shape, model.structure)
    found: dict[tuple[int, Product], LowRank] = {}
    for layer in range(model.shape.num_layers):
        for product, parts in PARTS.items():
            modules = [f"model.layers.{layer}.{part}" for part in parts]
            present = [(i, adapter.updates[m]) for i, m in enumerate(modules) if m in adapter.updates]
            if not present:
                continue
            sizes = [shapes[module + ".weight"][0] for module in modules]
            begins = np.cumsum([0, *sizes])
            b = np.zeros((begins[-1], sum(update.a.shape[0] for _, update in present)), np.float32)
            column = 0
            for i, update in present:
                rank = update.a.shape[0]
                b[begins[i] : begins[i + 1], column : column + rank] = update.b
                column += rank
            found[layer, product] = LowRank(np.concatenate([update.a for _, update in present]), b)
    return found

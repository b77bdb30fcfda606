"""What one step moves and computes, part by part: arithmetic from an architecture description.

An operation is a multiplication or an addition, so a multiply-accumulate counts two, as peaks of hardware are quoted.
Bytes are what has to be moved once whatever the implementation is; nothing is added for reading twice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from inferloop.core.errors import UsageError
from inferloop.core.shape import BYTES_PER_ELEMENT, ModelShape, Product

PartName = Product | Literal["head", "embedding", "norms", "attention", "activations"]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """`new[i]` tokens of sequence i are computed while `past[i]` tokens before them lie in the KV memory; `num_sampled`
    rows go through the head. Raises UsageError for counts that cannot be."""

    new: tuple[int, ...]
    past: tuple[int, ...]
    num_sampled: int

    def __post_init__(self) -> None:
        if len(self.new) != len(self.past):
            raise UsageError(f"{len(self.new)} sequences get new tokens, {len(self.past)} have a past")
        if min((*self.new, *self.past, self.num_sampled)) < 0 or self.num_sampled > self.num_new:
            raise UsageError("token counts must not be negative, nor more rows sampled than computed")

    @classmethod
    def decode(cls, num_sequences: int, past: int) -> StepLoad:
        """One token for each of `num_sequences` that have `past` tokens."""
        return cls((1,) * num_sequences, (past,) * num_sequences, num_sequences)

    @classmethod
    def prefill(cls, num_tokens: int) -> StepLoad:
        """One whole prompt, and its first token."""
        return cls((num_tokens,), (0,), 1)

    @property
    def num_new(self) -> int:
        return sum(self.new)

    def num_past_seen(self, window: int | None = None) -> int:
        """Tokens of KV memory that somebody attends to, each counted once for its sequence."""
        pairs = zip(self.new, self.past, strict=True)
        return sum(past if window is None else min(past, window - 1) for new, past in pairs if new)

    def num_scores(self, window: int | None = None) -> int:
        """Pairs of a query and a key that it sees: token j of a sequence sees the past, j before it, and itself."""
        return sum(_num_scores(new, past, window) for new, past in zip(self.new, self.past, strict=True))


def _num_scores(new: int, past: int, window: int | None) -> int:
    full = new if window is None else max(0, min(new, window - past))  # these queries see all that lies before them
    return full * past + full * (full + 1) // 2 + (new - full) * (window or 0)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the weights as a runner keeps them, scales included: of every kind of matrix over all layers, of the
    head, of one row of the embedding, and of the norms' gains."""

    qkv: float
    out: float
    gate_up: float
    down: float
    head: float
    embedding_row: float
    norms: float

    @classmethod
    def in_format(cls, shape: ModelShape, layers: str, head: str | None = None) -> WeightBytes:
        """All matrices of the layers in one format of BYTES_PER_ELEMENT, head and embedding in another (None: the
        same); gains in fp32. Padding that a runner adds is not counted."""
        each, last = BYTES_PER_ELEMENT[layers], BYTES_PER_ELEMENT[head or layers]
        n = shape.product_params
        gains = (2 * shape.num_layers + 1) * shape.hidden_size
        return cls(
            qkv=n["qkv"] * each,
            out=n["out"] * each,
            gate_up=n["gate_up"] * each,
            down=n["down"] * each,
            head=shape.head_params * last,
            embedding_row=shape.hidden_size * last,
            norms=gains * BYTES_PER_ELEMENT["fp32"],
        )


@dataclass(frozen=True, slots=True)
class PartCost:
    """`reused_after_bytes` is how much is moved before the same bytes come again, which says what cache they can be
    found in: for weights and KV a whole step, for activations one layer."""

    name: PartName
    read_bytes: float
    written_bytes: float
    ops: float
    reused_after_bytes: float

    @property
    def num_bytes(self) -> float:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, slots=True)
class StepCost:
    parts: tuple[PartCost, ...]

    def __getitem__(self, name: PartName) -> PartCost:
        return next(part for part in self.parts if part.name == name)

    def __iter__(self) -> Iterator[PartCost]:
        return iter(self.parts)

    @property
    def memory_bytes(self) -> float:
        """Weights and KV: what a step moves that the step before it moved, too. Activations stay behind."""
        return math.fsum(part.num_bytes for part in self.parts if part.name != "activations")

    @property
    def ops(self) -> float:
        return math.fsum(part.ops for part in self.parts)


def step_cost(
    shape: ModelShape,
    load: StepLoad,
    weights: WeightBytes,
    kv_bytes_per_token: float | None = None,
    *,
    windows: Sequence[int | None] = (None,),
) -> StepCost:
    """Of one step. `kv_bytes_per_token` over all layers, None: bf16. `windows`: keys that a query sees, itself
    included, of each layer or of layers that take turns; None: all. Of experts those that one token goes through are
    counted, which many tokens exceed.

    - Every weight is read once, however many rows there are; the head only when somebody is sampled, of the embedding
      one row for each token.
    - Attention reads what KV holds of the past and writes the new tokens; those that the same step reads again come
      from a cache. Scores and weighted sums are 2 operations for every query head, key and dimension, each.
    - Activations are what one product hands to the next, in fp32: read as input, written as output.
    - Norms, rotary embedding, softmax, the gated unit: no operations counted, they are under 1 % of a step.
    """
    kv = shape.kv_bytes_per_token("bf16") if kv_bytes_per_token is None else kv_bytes_per_token
    num_new, num_past = load.num_new, statistics.fmean(load.num_past_seen(window) for window in windows)
    once = 1 if num_new else 0
    head = weights.head if load.num_sampled else 0.0
    embedding = weights.embedding_row * num_new
    layers = weights.qkv + weights.out + weights.gate_up + weights.down + weights.norms
    moved = once * layers + head + embedding + kv * (num_past + num_new)
    params = shape.product_params

    def product(name: Product, num_bytes: float) -> PartCost:
        return PartCost(name, once * num_bytes, 0.0, 2.0 * params[name] * num_new, moved)

    num_scores = statistics.fmean(load.num_scores(window) for window in windows)
    scores = shape.num_attention_layers * shape.num_heads * shape.head_dim * num_scores
    inputs, outputs = (num_new * num * BYTES_PER_ELEMENT["fp32"] for num in _inputs_and_outputs(shape))
    return StepCost(
        (
            product("qkv", weights.qkv),
            product("out", weights.out),
            product("gate_up", weights.gate_up),
            product("down", weights.down),
            PartCost("head", head, 0.0, 2.0 * shape.head_params * load.num_sampled, moved),
            PartCost("embedding", embedding, 0.0, 0.0, moved),
            PartCost("norms", once * weights.norms, 0.0, 0.0, moved),
            PartCost("attention", kv * num_past, kv * num_new, 4.0 * scores, moved),
            PartCost("activations", inputs, outputs, 0.0, (inputs + outputs) / max(1, shape.num_layers)),
        )
    )


def _inputs_and_outputs(shape: ModelShape) -> tuple[int, int]:
    """Numbers that the products of all layers take and give for one token."""
    q = shape.num_heads * shape.head_dim * shape.num_attention_layers
    kv = shape.head_dim * sum(shape.kv_heads)
    hidden, ffn = shape.hidden_size * shape.num_layers, shape.ffn_size * shape.num_layers
    attending = shape.hidden_size * shape.num_attention_layers
    return attending + q + hidden + ffn, q + 2 * kv + attending + 2 * ffn + hidden

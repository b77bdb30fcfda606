"""Rotary embedding as config.json writes it, in both spellings."""

from __future__ import annotations

from inferloop.core.shape import ModelShape
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.structure import RopeKind, RopeSpec

_KINDS: dict[str, RopeKind] = {
    "default": "none",
    "none": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
}
_KNOWN = {
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "finetuned",
}
"""The last says where the weights come from and changes nothing; all others are read."""


def read_rope(fields: Fields, shape: ModelShape, rope: Fields | None = None, *, theta: float = 10_000.0) -> RopeSpec:
    """Of `rope` where that is given; else of the newer single `rope_parameters`, or of `rope_theta` beside
    `rope_scaling`. `theta` is the architecture's default. Raises ModelFileError for a kind, or a word about one, that
    is not computed here."""
    if rope is None:
        newer = fields.raw("rope_parameters") is not None
        rope = fields.within("rope_parameters" if newer else "rope_scaling")
    name = rope.text("rope_type") or rope.text("type") or "default"
    if name not in _KINDS:
        raise fields.fail("rope_scaling", f"has the unsupported type {name!r} (supported: {', '.join(_KINDS)})")
    unread = sorted(key for key in rope.keys() - _KNOWN if rope.raw(key) is not None)
    if unread:
        raise fields.fail("rope_scaling", f"has {unread[0]}, which is not supported")
    kind = _KINDS[name]
    factor = rope.real("factor", 1.0 if kind == "none" else None)
    if factor <= 0:
        raise fields.fail("rope_scaling", f"has the factor {factor}")
    partial = rope.real("partial_rotary_factor", fields.real("partial_rotary_factor", 1.0))
    dim = int(shape.head_dim * partial)
    if not 0 < dim <= shape.head_dim or dim % 2:
        raise fields.fail("partial_rotary_factor", f"gives {dim} rotated dimensions of {shape.head_dim}")
    original = rope.count("original_max_position_embeddings", shape.context_length)
    if kind == "dynamic":  # stretches what is longer than max_position_embeddings, whatever else is said
        original = shape.context_length
    return RopeSpec(
        theta=rope.real("rope_theta", fields.real("rope_theta", theta)),
        dim=dim,
        kind=kind,
        factor=factor,
        original_context_length=original,
        low_freq_factor=rope.real("low_freq_factor", 1.0),
        high_freq_factor=rope.real("high_freq_factor", 4.0),
        beta_fast=rope.real("beta_fast", 32.0),
        beta_slow=rope.real("beta_slow", 1.0),
        attention_factor=rope.real("attention_factor") if rope.raw("attention_factor") is not None else None,
    )

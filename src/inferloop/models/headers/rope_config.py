"""Rotary embedding as config.json writes it, in both spellings."""

from __future__ import annotations

from inferloop.core.shape import ModelShape
from inferloop.models.headers import rope_ranges as ranges
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
    factor = rope.between("factor", *ranges.FACTOR, 1.0 if kind == "none" else None)
    partial = rope.between("partial_rotary_factor", 0, 1, fields.between("partial_rotary_factor", 0, 1, 1.0))
    dim = int(shape.head_dim * partial)
    if not dim or dim % 2 or (dim == 2 and kind == "dynamic"):  # whose stretch has dim - 2 for a divisor
        raise fields.fail("partial_rotary_factor", f"gives {dim} rotated dimensions of {shape.head_dim}")
    original = rope.count("original_max_position_embeddings", shape.context_length)
    if kind == "dynamic":  # stretches what is longer than max_position_embeddings, whatever else is said
        original = shape.context_length
    has_attention = rope.raw("attention_factor") is not None
    spec = RopeSpec(
        theta=rope.between("rope_theta", *ranges.THETA, fields.between("rope_theta", *ranges.THETA, theta)),
        dim=dim,
        kind=kind,
        factor=factor,
        original_context_length=original,
        low_freq_factor=rope.between("low_freq_factor", *ranges.BAND, 1.0),
        high_freq_factor=rope.between("high_freq_factor", *ranges.BAND, 4.0),
        beta_fast=rope.between("beta_fast", *ranges.BAND, 32.0),
        beta_slow=rope.between("beta_slow", *ranges.BAND, 1.0),
        attention_factor=rope.between("attention_factor", *ranges.ATTENTION) if has_attention else None,
    )
    if spec.low_freq_factor >= spec.high_freq_factor:
        raise rope.fail("high_freq_factor", f"is {spec.high_freq_factor:g}, not above {spec.low_freq_factor:g}")
    if spec.beta_slow > spec.beta_fast:
        raise rope.fail("beta_fast", f"is {spec.beta_fast:g}, less than beta_slow, {spec.beta_slow:g}")
    return spec

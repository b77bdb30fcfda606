"""config.json of a Hugging Face directory -> shape, rope, token ids. Llama family, text part of a nested config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import ModelShape
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.header import FAMILIES, RopeKind, RopeSpec

_ROPE_KINDS: dict[str, RopeKind] = {
    "default": "none",
    "none": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
}


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """What config.json alone says."""

    shape: ModelShape
    rope: RopeSpec
    norm_eps: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None
    raw: Mapping[str, object]


def read_json_object(path: Path) -> dict[str, object]:
    """Raises ModelFileError when absent, not JSON, or not an object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{path.parent}: not a Hugging Face model directory, it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelFileError(f"{path}: cannot be read as JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds no JSON object")
    return value


def read_config(path: Path) -> ConfigFacts:
    """Raises ModelFileError for a family we do not run or values that make no sense."""
    raw = read_json_object(path)
    nested = raw.get("text_config")
    text = {**raw, **nested} if isinstance(nested, dict) else raw
    fields = Fields(text, path)
    family = fields.text("model_type")
    if family not in FAMILIES:
        raise ModelFileError(f"{path}: model_type {family!r} is not supported (supported: {', '.join(FAMILIES)})")
    if fields.raw("quantization_config") is not None:
        raise ModelFileError(f"{path}: quantization_config is not supported; use unquantized weights or a GGUF file")
    activation = fields.text("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise fields.fail("hidden_act", f"{activation!r} is not supported (silu is)")
    shape = _shape(fields, family)
    window = fields.raw("sliding_window")
    windowed = window is not None and fields.flag("use_sliding_window", family == "mistral")
    return ConfigFacts(
        shape=shape,
        rope=_rope(fields, text, path, shape),
        norm_eps=fields.real("rms_norm_eps"),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        sliding_window=fields.count("sliding_window") if windowed else None,
        raw=raw,
    )


def _shape(fields: Fields, family: str) -> ModelShape:
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", default=num_heads)
    if fields.raw("head_dim") is None and hidden % num_heads:
        raise fields.fail("hidden_size", f"is {hidden}, not divisible by {num_heads} heads")
    if num_heads % num_kv_heads:
        raise fields.fail("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    return ModelShape(
        architecture=family,
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.count("head_dim", default=hidden // num_heads),
        ffn_size=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        context_length=fields.count("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _rope(fields: Fields, text: Mapping[str, object], path: Path, shape: ModelShape) -> RopeSpec:
    """Both spellings: `rope_theta` with `rope_scaling`, and the newer single `rope_parameters`."""
    newer = text.get("rope_parameters")
    scaling = newer if newer is not None else text.get("rope_scaling")
    if scaling is None:
        scaling = {}
    if not isinstance(scaling, dict):
        raise fields.fail("rope_scaling", "is not an object")
    rope = Fields(scaling, path)
    name = rope.text("rope_type") or rope.text("type") or "default"
    if name not in _ROPE_KINDS:
        raise fields.fail("rope_scaling", f"has the unsupported type {name!r} (supported: {', '.join(_ROPE_KINDS)})")
    kind = _ROPE_KINDS[name]
    factor = rope.real("factor", 1.0 if kind == "none" else None)
    if factor <= 0:
        raise fields.fail("rope_scaling", f"has the factor {factor}")
    partial = rope.real("partial_rotary_factor", fields.real("partial_rotary_factor", 1.0))
    dim = int(shape.head_dim * partial)
    if not 0 < dim <= shape.head_dim or dim % 2:
        raise fields.fail("partial_rotary_factor", f"gives {dim} rotated dimensions of {shape.head_dim}")
    return RopeSpec(
        theta=rope.real("rope_theta", fields.real("rope_theta", 10000.0)),
        dim=dim,
        kind=kind,
        factor=factor,
        original_context_length=rope.count("original_max_position_embeddings", shape.context_length),
        low_freq_factor=rope.real("low_freq_factor", 1.0),
        high_freq_factor=rope.real("high_freq_factor", 4.0),
        beta_fast=rope.real("beta_fast", 32.0),
        beta_slow=rope.real("beta_slow", 1.0),
        attention_factor=rope.real("attention_factor") if rope.raw("attention_factor") is not None else None,
    )

"""config.json of a Hugging Face directory -> shape, rope, structure, token ids; the text part of a nested config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import Experts, ModelShape
from inferloop.models.headers.families import FAMILIES, Family, family_of_config
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.json_text import parse_json
from inferloop.models.headers.structure import Activation, RopeSpec, Structure

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MAX_JSON_BYTES = 1 << 22
"""Of a configuration: as objects it takes many times as much."""
_MAX_LAYERS = 10_000
_UNCOMPUTED = (
    "use_bidirectional_attention",
    "attention_sink",
    "attention_sinks",
    "attention_chunk_size",
    "attention_multiplier",
    "attn_temperature_tuning",
    "clip_qkv",
    "embedding_multiplier",
    "logit_scale",
    "logits_scaling",
    "no_rope_layers",
    "residual_multiplier",
    "router_scaling_factor",
    "shared_expert_intermediate_size",
)
"""Keys by which relatives of these architectures compute something else. Set to nothing, they change nothing."""


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """What config.json alone says."""

    shape: ModelShape
    rope: RopeSpec
    structure: Structure
    norm_eps: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, object]


def read_json_object(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, object]:
    """Raises ModelFileError when absent, longer than `max_bytes`, not JSON, or not an object."""
    if not path.is_file():  # nor a pipe, which has no end
        raise ModelFileError(f"{path.parent}: not a Hugging Face model directory, it has no {path.name}")
    try:
        if path.stat().st_size > max_bytes:
            raise ModelFileError(f"{path}: is longer than {max_bytes} bytes")
        value = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelFileError(f"{path}: cannot be read as JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds no JSON object")
    return value


def read_config(path: Path) -> ConfigFacts:
    """Raises ModelFileError for a family we do not run, values that make no sense, or words that we do not compute."""
    raw = read_json_object(path)
    nested = raw.get("text_config")
    text = {**raw, **nested} if isinstance(nested, dict) else raw
    model_type = Fields(text, path).text("model_type")
    family = family_of_config(model_type)
    if family is None:
        raise ModelFileError(f"{path}: model_type {model_type!r} is not supported (supported: {', '.join(FAMILIES)})")
    fields = Fields({**family.defaults, **text}, path)
    if fields.raw("quantization_config") is not None:
        raise ModelFileError(f"{path}: quantization_config is not supported; use unquantized weights or a GGUF file")
    fields.refuse(*_UNCOMPUTED)
    shape = _shape(fields, family)
    rope, structure = family.read_config(fields, shape)
    _check_activation(fields, structure)
    if rope.kind == "yarn":
        shape = replace(shape, context_length=max(shape.context_length, _extended(fields, rope)))
    return ConfigFacts(
        shape=shape,
        rope=rope,
        structure=structure,
        norm_eps=fields.real("rms_norm_eps"),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        raw=raw,
    )


def _extended(fields: Fields, rope: RopeSpec) -> int:
    """How long a context may be by YaRN's own words. Model cards have the extension added to a config.json by hand,
    which leaves the length from before there. 0 where they do not say from what it was extended."""
    newer = fields.raw("rope_parameters") is not None
    original = fields.within("rope_parameters" if newer else "rope_scaling").raw("original_max_position_embeddings")
    return int(rope.factor * rope.original_context_length) if original and rope.original_context_length else 0


def _check_activation(fields: Fields, structure: Structure) -> None:
    key = "hidden_act" if fields.raw("hidden_activation") is None else "hidden_activation"
    name = fields.text(key) or "silu"
    if _ACTIVATIONS.get(name) != structure.activation:
        raise fields.fail(key, f"{name!r} is not supported ({structure.activation} is)")


def _shape(fields: Fields, family: Family) -> ModelShape:
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", default=num_heads)
    if fields.raw("head_dim") is None and hidden % num_heads:
        raise fields.fail("hidden_size", f"is {hidden}, not divisible by {num_heads} heads")
    if num_heads % num_kv_heads:
        raise fields.fail("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    num_layers = fields.count("num_hidden_layers")
    if num_layers > _MAX_LAYERS:  # before anything of that length is built
        raise fields.fail("num_hidden_layers", f"is {num_layers}, more than {_MAX_LAYERS}")
    return ModelShape(
        architecture=family.name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.count("head_dim", default=hidden // num_heads),
        ffn_size=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        context_length=fields.count("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        experts=_experts(fields, num_layers) if family.has_experts else None,
    )


def _experts(fields: Fields, num_layers: int) -> Experts:
    named = "num_experts" if fields.raw("num_experts") is not None else "num_local_experts"
    num, per_token = fields.count(named), fields.count("num_experts_per_tok", 2)
    if per_token > num:
        raise fields.fail("num_experts_per_tok", f"is {per_token}, of {num} experts")
    step, dense = fields.count("decoder_sparse_step", 1), fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise fields.fail("mlp_only_layers", "is not a list of layers")
    return Experts(
        num=num,
        per_token=per_token,
        ffn_size=fields.count("moe_intermediate_size", fields.count("intermediate_size")),
        layers=tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense),
    )

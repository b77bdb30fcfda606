"""Gemma 3 (https://arxiv.org/abs/2503.19786): five local layers to a global one, each kind with a rotary base of its
own, and norms over queries and keys. The text decoder alone."""

from __future__ import annotations

import math

from inferloop.core.shape import ModelShape
from inferloop.models.headers.families.family import SANDWICH_GGUF_NAMES, Family
from inferloop.models.headers.families.gemma2 import gguf_query_scale
from inferloop.models.headers.families.windows import alternating, by_layer_type
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.rope_config import read_rope
from inferloop.models.headers.rope_ranges import THETA
from inferloop.models.headers.structure import RopeSpec, Structure

_PATTERN = 6
_LOCAL_THETA = 10_000.0
_LAYERS_OF_27B = 62


def _config(fields: Fields, shape: ModelShape) -> tuple[RopeSpec, Structure]:
    fields.refuse("attn_logit_softcapping")
    pattern = fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", _PATTERN))
    newer = fields.raw("rope_parameters")
    if isinstance(newer, dict) and ("full_attention" in newer or "sliding_attention" in newer):
        both = fields.within("rope_parameters")
        rope = read_rope(fields, shape, both.within("full_attention"), theta=1e6)
        local = read_rope(fields, shape, both.within("sliding_attention"), theta=_LOCAL_THETA)
    else:
        rope = read_rope(fields, shape, theta=1e6)
        local = _local(fields.between("rope_local_base_freq", *THETA, _LOCAL_THETA), shape)
    return rope, Structure(
        windows=by_layer_type(fields, shape, is_local=lambda i: (i + 1) % pattern != 0),
        local_rope=local,
        query_scale=1 / math.sqrt(fields.positive("query_pre_attn_scalar", 256.0)),
        final_softcap=fields.optional_positive("final_logit_softcapping"),
        embedding_scale=math.sqrt(shape.hidden_size),
        activation="gelu_tanh",
        qk_norms=True,
        output_norms=True,
        norm_offset=1.0,
        fp32_norms=True,
    )


def _gguf(fields: Fields, shape: ModelShape, rope: RopeSpec) -> Structure:
    """As Gemma 2's, and the local base is said by newer files only; it is the same for all that there are."""
    fields.refuse("attn_logit_softcapping")
    return Structure(
        windows=alternating(fields, shape, _PATTERN),
        local_rope=_local(fields.between("rope.freq_base_swa", *THETA, _LOCAL_THETA), shape),
        query_scale=gguf_query_scale(shape, _LAYERS_OF_27B),
        final_softcap=fields.optional_positive("final_logit_softcapping"),
        embedding_scale=math.sqrt(shape.hidden_size),
        activation="gelu_tanh",
        qk_norms=True,
        output_norms=True,
        fp32_norms=True,
    )


def _local(theta: float, shape: ModelShape) -> RopeSpec:
    return RopeSpec(theta, shape.head_dim, original_context_length=shape.context_length)


FAMILY = Family(
    "gemma3",
    "gemma3",
    _config,
    _gguf,
    model_types=("gemma3_text",),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    gguf_names=SANDWICH_GGUF_NAMES,
)

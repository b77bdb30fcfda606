"""Gemma 2 (https://arxiv.org/abs/2408.00118): every other layer is local, scores and logits are capped, norms stand on
both sides of attention and feed-forward."""

from __future__ import annotations

import math

from inferloop.core.shape import ModelShape
from inferloop.models.headers.families.family import SANDWICH_GGUF_NAMES, Family
from inferloop.models.headers.families.windows import alternating, by_layer_type
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.rope_config import read_rope
from inferloop.models.headers.structure import RopeSpec, Structure

_LAYERS_OF_27B = 46
_WINDOW, _ATTENTION_CAP, _FINAL_CAP = 4096, 50.0, 30.0


def _config(fields: Fields, shape: ModelShape) -> tuple[RopeSpec, Structure]:
    return read_rope(fields, shape), Structure(
        windows=by_layer_type(fields, shape, is_local=lambda i: i % 2 == 0),
        query_scale=1 / math.sqrt(fields.positive("query_pre_attn_scalar", 256.0)),
        attention_softcap=fields.optional_positive("attn_logit_softcapping"),
        final_softcap=fields.optional_positive("final_logit_softcapping"),
        embedding_scale=math.sqrt(shape.hidden_size),
        activation="gelu_tanh",
        output_norms=True,
        norm_offset=1.0,
        fp32_norms=True,
    )


def _gguf(fields: Fields, shape: ModelShape, rope: RopeSpec) -> Structure:
    """GGUF keeps gains with the 1 added, and says neither the scale of queries, which is another in one size, nor which
    layers are local. The first files do not say the caps and the window either, which are the same for all."""
    return Structure(
        windows=alternating(fields, shape, 2, window=_WINDOW),
        query_scale=gguf_query_scale(shape, _LAYERS_OF_27B),
        attention_softcap=fields.positive("attn_logit_softcapping", _ATTENTION_CAP),
        final_softcap=fields.positive("final_logit_softcapping", _FINAL_CAP),
        embedding_scale=math.sqrt(shape.hidden_size),
        activation="gelu_tanh",
        output_norms=True,
        fp32_norms=True,
    )


def gguf_query_scale(shape: ModelShape, layers_of_27b: int) -> float:
    """The largest model of a generation divides by the width of a head as if heads filled the hidden size."""
    width = shape.hidden_size // shape.num_heads if shape.num_layers == layers_of_27b else shape.head_dim
    return 1 / math.sqrt(width)


FAMILY = Family(
    "gemma2",
    "gemma2",
    _config,
    _gguf,
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "head_dim": 256,
        "sliding_window": _WINDOW,
        "attn_logit_softcapping": _ATTENTION_CAP,
        "final_logit_softcapping": _FINAL_CAP,
        "rms_norm_eps": 1e-6,
    },
    gguf_names=SANDWICH_GGUF_NAMES,
)

"""Qwen3 with experts in every `decoder_sparse_step`-th layer, but for those in `mlp_only_layers`."""

from __future__ import annotations

from inferloop.core.shape import ModelShape
from inferloop.models.headers.families.family import EXPERT_GGUF_NAMES, Family
from inferloop.models.headers.families.windows import of_all_layers
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.rope_config import read_rope
from inferloop.models.headers.structure import RopeSpec, Structure


def _config(fields: Fields, shape: ModelShape) -> tuple[RopeSpec, Structure]:
    windows = of_all_layers(fields, shape) if fields.flag("use_sliding_window", False) else ()
    return read_rope(fields, shape), Structure(
        windows=windows, qk_norms=True, renormalized_experts=fields.flag("norm_topk_prob", False)
    )


def _gguf(fields: Fields, shape: ModelShape, rope: RopeSpec) -> Structure:
    """Files that do not say it are of models that have it."""
    fields.refuse("attention.sliding_window")
    return Structure(qk_norms=True, renormalized_experts=fields.flag("expert_weights_norm", True))


FAMILY = Family("qwen3_moe", "qwen3moe", _config, _gguf, gguf_names=EXPERT_GGUF_NAMES, has_experts=True)

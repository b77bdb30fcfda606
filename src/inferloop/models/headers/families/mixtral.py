"""Mixtral: llama with experts instead of the feed-forward, two of them for each token
(https://arxiv.org/abs/2401.04088)."""

from __future__ import annotations

from inferloop.core.shape import ModelShape
from inferloop.models.headers.families.family import EXPERT_GGUF_NAMES, Family
from inferloop.models.headers.families.windows import of_all_layers
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.rope_config import read_rope
from inferloop.models.headers.structure import RopeSpec, Structure


def _config(fields: Fields, shape: ModelShape) -> tuple[RopeSpec, Structure]:
    return read_rope(fields, shape, theta=1e6), Structure(windows=of_all_layers(fields, shape))


def _gguf(fields: Fields, shape: ModelShape, rope: RopeSpec) -> Structure:
    return Structure(windows=of_all_layers(fields, shape, "attention.sliding_window"))


FAMILY = Family(
    "mixtral", "llama", _config, _gguf, gguf_names=EXPERT_GGUF_NAMES, gguf_interleaved=True, has_experts=True
)

"""Llama 2 and 3 and what shares their code: SmolLM2, TinyLlama, ..."""

from __future__ import annotations

from inferloop.core.shape import ModelShape
from inferloop.models.headers.families.family import Family
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.rope_config import read_rope
from inferloop.models.headers.structure import RopeSpec, Structure


def _config(fields: Fields, shape: ModelShape) -> tuple[RopeSpec, Structure]:
    return read_rope(fields, shape), Structure()


def _gguf(fields: Fields, shape: ModelShape, rope: RopeSpec) -> Structure:
    fields.refuse("attention.sliding_window", "expert_count")
    return Structure()


FAMILY = Family("llama", "llama", _config, _gguf, gguf_interleaved=True)

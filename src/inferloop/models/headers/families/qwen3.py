"""Qwen3: no biases, and norms over each head's queries and keys."""

from __future__ import annotations

from inferloop.core.shape import ModelShape
from inferloop.models.headers.families.family import Family
from inferloop.models.headers.families.qwen2 import qwen_windows
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.rope_config import read_rope
from inferloop.models.headers.structure import RopeSpec, Structure


def _config(fields: Fields, shape: ModelShape) -> tuple[RopeSpec, Structure]:
    return read_rope(fields, shape), Structure(windows=qwen_windows(fields, shape), qk_norms=True)


def _gguf(fields: Fields, shape: ModelShape, rope: RopeSpec) -> Structure:
    fields.refuse("attention.sliding_window")
    return Structure(qk_norms=True)


FAMILY = Family("qwen3", "qwen3", _config, _gguf, defaults={"head_dim": 128})

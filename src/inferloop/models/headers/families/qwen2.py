"""Qwen2 and 2.5: biases on q, k and v; a window, where it is used at all, from layer `max_window_layers` on."""

from __future__ import annotations

from inferloop.core.shape import ModelShape
from inferloop.models.headers.families.family import Family
from inferloop.models.headers.families.windows import Windows, by_layer_type
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.rope_config import read_rope
from inferloop.models.headers.structure import RopeSpec, Structure


def qwen_windows(fields: Fields, shape: ModelShape) -> Windows:
    if not fields.flag("use_sliding_window", False) or fields.raw("sliding_window") is None:
        return by_layer_type(fields, shape, is_local=lambda _: False)
    first = fields.raw("max_window_layers")
    begin = 28 if first is None else 0 if first == 0 else fields.count("max_window_layers")
    return by_layer_type(fields, shape, is_local=lambda i: i >= begin)


def _config(fields: Fields, shape: ModelShape) -> tuple[RopeSpec, Structure]:
    return read_rope(fields, shape), Structure(windows=qwen_windows(fields, shape))


def _gguf(fields: Fields, shape: ModelShape, rope: RopeSpec) -> Structure:
    fields.refuse("attention.sliding_window")
    return Structure()


FAMILY = Family("qwen2", "qwen2", _config, _gguf)

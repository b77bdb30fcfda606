"""Mistral 7B: llama with a window in every layer, which later versions say they have not (null)."""

from __future__ import annotations

from inferloop.core.shape import ModelShape
from inferloop.models.headers.families.family import Family
from inferloop.models.headers.families.windows import by_layer_type, of_all_layers
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.rope_config import read_rope
from inferloop.models.headers.structure import RopeSpec, Structure


def _config(fields: Fields, shape: ModelShape) -> tuple[RopeSpec, Structure]:
    windows = of_all_layers(fields, shape)
    if by_layer_type(fields, shape, is_local=lambda _: bool(windows)) != windows:
        raise fields.fail("layer_types", "has layers of two kinds, which mistral has not")
    return read_rope(fields, shape), Structure(windows=windows)


def _gguf(fields: Fields, shape: ModelShape, rope: RopeSpec) -> Structure:
    return Structure(windows=of_all_layers(fields, shape, "attention.sliding_window"))


FAMILY = Family("mistral", "mistral", _config, _gguf, defaults={"sliding_window": 4096}, gguf_interleaved=True)

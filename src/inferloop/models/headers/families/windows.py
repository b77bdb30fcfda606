"""Which layers look back how far."""

from __future__ import annotations

from collections.abc import Callable

from inferloop.core.shape import ModelShape
from inferloop.models.headers.fields import Fields

Windows = tuple[int | None, ...]


def of_all_layers(fields: Fields, shape: ModelShape, key: str = "sliding_window") -> Windows:
    """One window for every layer, or none."""
    if fields.raw(key) is None:
        return ()
    return (fields.count(key),) * shape.num_layers


def by_layer_type(fields: Fields, shape: ModelShape, *, is_local: Callable[[int], bool]) -> Windows:
    """As `layer_types` says, which `is_local` stands in for where there is none. Raises ModelFileError for kinds of
    layers other than sliding and full attention."""
    types = fields.raw("layer_types")
    if types is None:
        locals_ = [is_local(i) for i in range(shape.num_layers)]
    elif not isinstance(types, list) or len(types) != shape.num_layers:
        raise fields.fail("layer_types", f"is not a list of one for each of {shape.num_layers} layers")
    else:
        other = [t for t in types if t not in ("full_attention", "sliding_attention")]
        if other:
            raise fields.fail("layer_types", f"has {str(other[0])!r}, which is not supported")
        locals_ = [t == "sliding_attention" for t in types]
    if not any(locals_):
        return ()
    window = fields.count("sliding_window")
    return tuple(window if local else None for local in locals_)


def alternating(fields: Fields, shape: ModelShape, pattern: int, *, window: int | None = None) -> Windows:
    """GGUF's: every `pattern`-th layer sees everything. `attention.sliding_window_pattern` may say otherwise, with a
    number or a list of flags. `window`: what a file may leave out."""
    said = fields.raw("attention.sliding_window_pattern")
    if isinstance(said, list):
        if len(said) != shape.num_layers or any(flag not in (0, 1) for flag in said):
            raise fields.fail("attention.sliding_window_pattern", "is not one flag for each layer")
        locals_ = [bool(flag) for flag in said]
    else:
        every = fields.count("attention.sliding_window_pattern", pattern)
        locals_ = [(i + 1) % every != 0 for i in range(shape.num_layers)]
    if not any(locals_):
        return ()
    window = fields.count("attention.sliding_window", window)
    return tuple(window if local else None for local in locals_)

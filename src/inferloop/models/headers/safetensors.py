"""safetensors header: eight bytes of length, JSON, then data (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

import struct
from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.models.headers.dtypes import SAFETENSORS_TYPES
from inferloop.models.headers.header import TensorInfo
from inferloop.models.headers.json_text import parse_json

_MAX_HEADER_BYTES = 100_000_000
_ANY_HEADER_BYTES, _HEADER_SHARE = 1 << 18, 8
"""As objects a header takes up to some twenty times its bytes: so it may have this many in any file, and of a large one
no more than this part."""


def read_safetensors(path: Path) -> dict[str, TensorInfo]:
    """Tensors by their name in the file. Raises ModelFileError for anything that is not a whole, sound file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ModelFileError(f"{path}: truncated or damaged: its header cannot be {length} bytes long")
            if length > _ANY_HEADER_BYTES + size // _HEADER_SHARE:
                raise ModelFileError(f"{path}: its header is {length} bytes long, too much of {size} in all")
            header = parse_json(file.read(length).decode("utf-8"), _unique)
    except ModelFileError:
        raise
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelFileError(f"{path}: cannot be read as safetensors: {problem}") from problem
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: its header is not a JSON object")
    start = 8 + length
    tensors = {
        name: _tensor(path, name, entry, start, size) for name, entry in header.items() if name != "__metadata__"
    }
    previous: TensorInfo | None = None
    for info in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if previous is not None and info.offset < previous.offset + previous.num_bytes:
            raise ModelFileError(f"{path}: tensors {previous.name} and {info.name} overlap")
        previous = info
    return tensors


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name appears twice in the header")
    return out


def _tensor(path: Path, name: str, entry: object, start: int, size: int) -> TensorInfo:
    def fail(problem: str) -> ModelFileError:
        return ModelFileError(f"{path}: tensor {name} {problem}")

    if not isinstance(entry, dict):
        raise fail("is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_TYPES:
        raise fail(f"has the unknown dtype {dtype!r}")
    if shape is None or len(shape) > 8:
        raise fail("has no sound shape")
    if offsets is None or len(offsets) != 2:
        raise fail("has no sound data_offsets")
    short, width = SAFETENSORS_TYPES[dtype]
    num_bytes = width
    for dim in shape:
        num_bytes *= dim
    begin, end = offsets
    if end - begin != num_bytes:
        raise fail(f"takes {end - begin} bytes, its shape needs {num_bytes}")
    if start + end > size:
        raise fail(f"ends at byte {start + end}, the file has {size} (truncated or damaged)")
    return TensorInfo(name, short, shape, path, start + begin, num_bytes)


def _counts(value: object) -> tuple[int, ...] | None:
    sound = isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)
    return tuple(value) if sound and isinstance(value, list) else None

"""GGUF container, versions 2 and 3, little-endian: key-values and tensor directory, no weights.

Written for files that may be truncated or hostile; layout from
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A 49k-token vocabulary reads in well under 0.2 s.
"""

from __future__ import annotations

import array
import mmap
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.models.headers.bounded import BoundedReader
from inferloop.models.headers.dtypes import GGML_TYPES

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_MAX_NAME_BYTES = 65_535
_MAX_DIMS = 4
_NUMBER_BYTES, _TEXT_BYTES, _ENTRY_BYTES = 40, 80, 800
"""What one of an array's numbers or texts takes as an object with all that points to it, and a key or tensor."""
_MAX_ARRAY_DEPTH = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is row-major, outermost first (the file stores it the other way round); `offset` is absolute."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What stands before the weights. Arrays are lists of plain values."""

    path: Path
    version: int
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]


def read_gguf_file(path: Path) -> GgufFile:
    """Raises ModelFileError naming the file and the field for anything that is not a whole, sound GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _read(BoundedReader(mapped, path))
    except ModelFileError:
        raise
    except (OSError, ValueError) as problem:  # unreadable, or empty (an empty file cannot be mapped)
        raise ModelFileError(f"{path}: cannot be read as GGUF: {problem}") from problem


def _read(reader: BoundedReader) -> GgufFile:
    magic = reader.take(4, "the magic number")
    if magic != b"GGUF":
        raise reader.fail(f"not a GGUF file: it starts with {magic!r}")
    version = int(reader.number(_U32, "the version"))
    if version not in (2, 3):
        raise reader.fail(f"GGUF version {version} is not supported (2 and 3 are)")
    num_tensors = reader.count(_U64, "the number of tensors", 24)
    num_keys = reader.count(_U64, "the number of keys", 13)
    reader.spend(_ENTRY_BYTES * num_keys, "the number of keys")
    metadata: dict[str, object] = {}
    for _ in range(num_keys):
        key = _string(reader, "a key", _MAX_NAME_BYTES)
        if key in metadata:
            raise reader.fail(f"key {key!r} appears twice")
        metadata[key] = _value(reader, int(reader.number(_U32, f"the type of {key}")), key, 0)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise reader.fail(f"general.alignment is {alignment!r}, not a power of two")
    reader.spend(_ENTRY_BYTES * num_tensors, "the number of tensors")
    relative = [_tensor(reader) for _ in range(num_tensors)]
    data_start = -(-reader.at // alignment) * alignment
    return GgufFile(reader.file, version, metadata, _place(reader, relative, data_start, alignment))


def _string(reader: BoundedReader, what: str, limit: int | None = None) -> str:
    length = reader.count(_U64, f"the length of {what}", 1)
    if limit is not None and length > limit:
        raise reader.fail(f"{what} is {length} bytes long")
    try:
        return reader.take(length, what).decode()
    except UnicodeDecodeError as problem:
        raise reader.fail(f"{what} is not valid UTF-8: {problem}") from problem


def _value(reader: BoundedReader, kind: int, key: str, depth: int) -> object:
    if kind in _SCALARS:
        return reader.number(_SCALARS[kind], key)
    if kind == _STRING:
        return _string(reader, key)
    if kind != _ARRAY:
        raise reader.fail(f"{key} has the unknown type {kind}")
    if depth >= _MAX_ARRAY_DEPTH:
        raise reader.fail(f"{key} nests arrays deeper than {_MAX_ARRAY_DEPTH}")
    item = int(reader.number(_U32, f"the element type of {key}"))
    if item in _SCALARS:
        layout = _SCALARS[item]
        num = reader.count(_U64, f"the length of {key}", layout.size)
        reader.spend(_NUMBER_BYTES * num, key)
        data = reader.take(num * layout.size, key)
        if layout.format == "<?":
            return [byte != 0 for byte in data]
        numbers = array.array(layout.format[1:], data)  # `unpack` would make a tuple first
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()
    if item == _STRING:
        num = reader.count(_U64, f"the length of {key}", 8)
        reader.spend(_TEXT_BYTES * num, key)
        return _strings(reader, num, key)
    if item != _ARRAY:
        raise reader.fail(f"{key} is an array of the unknown type {item}")
    num = reader.count(_U64, f"the length of {key}", 12)
    reader.spend(_TEXT_BYTES * num, key)
    return [_value(reader, _ARRAY, key, depth + 1) for _ in range(num)]


def _strings(reader: BoundedReader, num: int, key: str) -> list[str]:
    """The hot loop: vocabularies have 50k to 260k strings, so the checks of `_string` are spelled out once here."""
    buffer, at, end = reader.buffer, reader.at, len(reader.buffer)
    unpack = _U64.unpack_from
    out: list[str] = []
    try:
        for _ in range(num):
            start = at + 8
            if start > end:
                raise reader.fail(f"truncated or damaged: {key} ends after {len(out)} of {num} strings")
            at = start + unpack(buffer, at)[0]
            if at > end:
                raise reader.fail(f"truncated or damaged: string {len(out)} of {key} reaches past the end of the file")
            out.append(buffer[start:at].decode())
    except UnicodeDecodeError as problem:
        raise reader.fail(f"string {len(out)} of {key} is not valid UTF-8: {problem}") from problem
    reader.at = at
    return out


def _tensor(reader: BoundedReader) -> GgufTensor:
    """One row of the directory; `offset` is still relative to the data section."""
    name = _string(reader, "a tensor's name", _MAX_NAME_BYTES)
    num_dims = int(reader.number(_U32, f"the rank of {name}"))
    if not 1 <= num_dims <= _MAX_DIMS:
        raise reader.fail(f"tensor {name} has {num_dims} dimensions")
    dims = tuple(int(reader.number(_U64, f"a dimension of {name}")) for _ in range(num_dims))
    kind = int(reader.number(_U32, f"the type of {name}"))
    offset = int(reader.number(_U64, f"the offset of {name}"))
    if kind not in GGML_TYPES:
        raise reader.fail(f"tensor {name} has the unknown type {kind}")
    dtype, block, block_bytes = GGML_TYPES[kind]
    num_elements = 1
    for dim in dims:
        num_elements *= dim
    if num_elements < 1 or dims[0] % block:
        raise reader.fail(f"tensor {name} has dimensions {dims}, which {dtype} blocks of {block} cannot fill")
    return GgufTensor(name, dtype, dims[::-1], offset, num_elements // block * block_bytes)


def _place(reader: BoundedReader, relative: list[GgufTensor], data_start: int, alignment: int) -> dict[str, GgufTensor]:
    size = len(reader.buffer)
    placed: dict[str, GgufTensor] = {}
    for t in relative:
        if t.name in placed:
            raise reader.fail(f"tensor {t.name} appears twice")
        if t.offset % alignment:
            raise reader.fail(f"tensor {t.name} starts at {t.offset}, not a multiple of the alignment {alignment}")
        start = data_start + t.offset
        if start + t.num_bytes > size:
            raise reader.fail(
                f"truncated or damaged: tensor {t.name} ends at byte {start + t.num_bytes}, the file has {size}"
            )
        placed[t.name] = GgufTensor(t.name, t.dtype, t.shape, start, t.num_bytes)
    previous: GgufTensor | None = None
    for t in sorted(placed.values(), key=lambda t: t.offset):
        if previous is not None and t.offset < previous.offset + previous.num_bytes:
            raise reader.fail(f"tensors {previous.name} and {t.name} overlap")
        previous = t
    return placed

"""GGUF files with something wrong in them: a sound one taken apart into numbers and texts, and put together again."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from lab.fuzz_files.numbers import BYTES, damaged_bytes, size

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_FLOATS = (0.0, -0.0, 1e38, -1e38, 1e-45, float("nan"), float("inf"))


@dataclass(frozen=True, slots=True)
class Piece:
    """`form` is a letter of `struct`, and `value` its number; "" is for bytes as they are."""

    form: str
    value: int | float | bytes

    def packed(self) -> bytes:
        if isinstance(self.value, bytes):
            return self.value
        if self.form in "fd":
            return struct.pack(f"<{self.form}", self.value)
        width = struct.calcsize(self.form)
        return (int(self.value) & ((1 << (8 * width)) - 1)).to_bytes(width, "little")


Section = list[Piece]


class Parts:
    """head, one section for each key and for each tensor, and the weights."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self.head = [Piece("", self._bytes(4)), self._number("I"), self._number("Q"), self._number("Q")]
        num_tensors, num_keys = int(self.head[2].value), int(self.head[3].value)
        self.keys = [self._key() for _ in range(num_keys)]
        self.tensors = [self._tensor() for _ in range(num_tensors)]
        self.weights = data[-(-self._at // 32) * 32 :]

    def _bytes(self, num: int) -> bytes:
        self._at += num
        return self._data[self._at - num : self._at]

    def _number(self, form: str) -> Piece:
        return Piece(form, struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0])

    def _text(self) -> Section:
        length = self._number("Q")
        return [length, Piece("", self._bytes(int(length.value)))]

    def _key(self) -> Section:
        name, kind = self._text(), self._number("I")
        return [*name, kind, *self._value(int(kind.value))]

    def _value(self, kind: int) -> Section:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return [self._number(_SCALARS[kind])]
        item, count = self._number("I"), self._number("Q")
        return [item, count, *(piece for _ in range(int(count.value)) for piece in self._value(int(item.value)))]

    def _tensor(self) -> Section:
        name, rank = self._text(), self._number("I")
        dims = [self._number("Q") for _ in range(int(rank.value))]
        return [*name, rank, *dims, self._number("I"), self._number("Q")]


def case(rng: random.Random, samples: list[bytes]) -> bytes:
    """One file, of a sound one."""
    data = rng.choice(samples)
    way = rng.random()
    if way < 0.3:
        return damaged_bytes(rng, data, 4096)
    parts = Parts(data)
    if way < 0.4:
        _swell(rng, parts)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _damage(rng, parts)
    before = b"".join(p.packed() for s in (parts.head, *parts.keys, *parts.tensors) for p in s)
    made = before + bytes(-len(before) % rng.choice((32, 32, 32, 1))) + parts.weights
    return damaged_bytes(rng, made, 4096) if rng.random() < 0.1 else made


def _damage(rng: random.Random, parts: Parts) -> None:
    sections = rng.choice(([parts.head], parts.keys, parts.tensors, parts.tensors))
    if not sections:
        return
    at = rng.randrange(len(sections))
    fate = rng.random()
    if fate < 0.08:
        del sections[at]
        _count(parts)
    elif fate < 0.16:
        sections.append(list(sections[at]))
        _count(parts)
    else:
        _change(rng, sections[at])


def _count(parts: Parts) -> None:
    parts.head[2:4] = [Piece("Q", len(parts.tensors)), Piece("Q", len(parts.keys))]


def _change(rng: random.Random, section: Section) -> None:
    at = rng.choice((rng.randrange(len(section)), rng.randrange(min(6, len(section))), len(section) - 1))
    piece = section[at]
    if isinstance(piece.value, bytes):
        new = rng.choice(BYTES) if rng.random() < 0.5 else damaged_bytes(rng, piece.value, 64)
        section[at] = Piece("", new)
        if at and section[at - 1].form == "Q" and rng.random() < 0.8:
            section[at - 1] = Piece("Q", len(new))
    elif piece.form in "fd":
        section[at] = Piece(piece.form, rng.choice(_FLOATS))
    else:
        section[at] = Piece(piece.form, size(rng, int(piece.value)))


def _swell(rng: random.Random, parts: Parts) -> None:
    """One more key, or many more tensors, of which the file is full."""
    num = rng.choice((10, 1000, 20_000, 200_000))
    kind = rng.randrange(4)
    if kind == 0:  # texts of two letters
        body = [
            Piece("I", _STRING),
            Piece("Q", num),
            Piece("", struct.pack("<Q", 2) + b"ab") if num else Piece("", b""),
        ]
        body[2] = Piece("", (struct.pack("<Q", 2) + b"ab") * num)
    elif kind == 1:  # numbers
        item = rng.choice(list(_SCALARS))
        width = struct.calcsize(f"<{_SCALARS[item]}")
        body = [Piece("I", item), Piece("Q", num), Piece("", rng.randbytes(width * num))]
    elif kind == 2:  # arrays of arrays of nothing
        body = [Piece("I", _ARRAY), Piece("Q", num), Piece("", struct.pack("<IQ", 0, 0) * num)]
    else:
        for i in range(num // 10):
            name = b"t%d" % i
            parts.tensors.append(
                [Piece("Q", len(name)), Piece("", name), Piece("I", 1), Piece("Q", 1), Piece("I", 24), Piece("Q", 0)]
            )
        _count(parts)
        return
    name = rng.choice((b"tokenizer.ggml.tokens", b"general.swollen", b"llama.attention.head_count_kv"))
    parts.keys = [key for key in parts.keys if key[1].value != name]
    parts.keys.append([Piece("Q", len(name)), Piece("", name), Piece("I", _ARRAY), *body])
    _count(parts)

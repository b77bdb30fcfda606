"""GGUF's quantized blocks as what they mean: codes, and a scale (and a minimum) for each group of them.

Block layouts are those of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class GroupForm:
    """weight = scale * (code - offset) + min, where `group` neighbouring inputs share a scale and a min.

    `bits` is 4 or 8, and codes are not negative. `wide`: the scales and mins do not all fit fp16.
    """

    bits: int
    group: int
    offset: int
    wide: bool
    has_min: bool


@dataclass(frozen=True, slots=True)
class GroupCodes:
    """Rows of k weights: codes uint8 [rows][k]; scales, and mins or None, fp32 [rows][k / group]. Scales and mins are
    exactly those that the blocks state, or products of two numbers that they state, which fp32 holds exactly."""

    form: GroupForm
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    mins: NDArray[np.float32] | None = None

    def values(self) -> NDArray[np.float32]:
        """fp32 [rows][k], the blocks' own numbers to the last bit."""
        rows, k = self.codes.shape
        out = self.codes.reshape(rows, -1, self.form.group).astype(np.float32)
        out -= self.form.offset
        out *= self.scales[..., None]
        if self.mins is not None:
            out += self.mins[..., None]
        return out.reshape(rows, k)


def common_form(forms: list[GroupForm]) -> GroupForm:
    """The smallest form that each of these can be brought into exactly. Offsets are made equal by shifting codes, for
    which four bits have no room."""
    offset = max(f.offset for f in forms)
    shifted = any(f.offset != offset for f in forms)
    return GroupForm(
        bits=8 if shifted else max(f.bits for f in forms),
        group=min(f.group for f in forms),
        offset=offset,
        wide=any(f.wide for f in forms),
        has_min=any(f.has_min for f in forms),
    )


def promote(groups: GroupCodes, form: GroupForm) -> GroupCodes:
    """The same weights in a form that `common_form` found for them."""
    old = groups.form
    if old == form:
        return groups
    repeats = old.group // form.group
    mins = groups.mins
    if mins is None and form.has_min:
        mins = np.zeros_like(groups.scales)
    return GroupCodes(
        form,
        groups.codes + np.uint8(form.offset - old.offset),
        groups.scales.repeat(repeats, -1),
        None if mins is None else mins.repeat(repeats, -1),
    )


def read_groups(dtype: str, stored: NDArray[np.uint8]) -> GroupCodes:
    """Rows of stored blocks, uint8 [rows][bytes of a row], of a type in GROUP_TYPES."""
    kind = GROUP_TYPES[dtype]
    blocks = np.ascontiguousarray(stored).view(kind.block)  # [rows][blocks]
    codes, scales, mins = kind.read(blocks)
    rows = len(blocks)
    return GroupCodes(
        kind.form,
        codes.reshape(rows, -1),
        scales.astype(np.float32, copy=False).reshape(rows, -1),
        None if mins is None else mins.astype(np.float32, copy=False).reshape(rows, -1),
    )


_Parts = tuple[NDArray[np.uint8], NDArray[np.floating[Any]], NDArray[np.floating[Any]] | None]


@dataclass(frozen=True, slots=True)
class GroupType:
    """`block`: a numpy type with a block's fields. `read`: [rows][blocks] of it -> codes, scales, mins."""

    form: GroupForm
    block: np.dtype[Any]
    read: Callable[[NDArray[Any]], _Parts]


def _halves(qs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes [..., n] -> [..., 2, n]: all low halves, then all high ones."""
    return np.stack([qs & 0x0F, qs >> 4], -2)


def _bits32(qh: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Four bytes -> their 32 bits as 0 or 16, the fifth bit of a code; lowest first, as [..., 2, 16]."""
    bits = np.unpackbits(qh, axis=-1, bitorder="little") << np.uint8(4)
    return bits.reshape(*bits.shape[:-1], 2, 16)


def _plain4(b: NDArray[Any]) -> _Parts:
    return _halves(b["qs"]), b["d"], b["m"] if "m" in (b.dtype.names or ()) else None


def _plain5(b: NDArray[Any]) -> _Parts:
    _, scales, mins = _plain4(b)
    return _halves(b["qs"]) | _bits32(b["qh"]), scales, mins


def _signed8(b: NDArray[Any]) -> _Parts:
    return b["qs"] ^ np.uint8(0x80), b["d"], None  # two's complement + 128


def _scales_and_mins(b: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Q4_K and Q5_K: eight six-bit scales and mins in 12 bytes, four of which hold their upper bits. The products are
    exact: 11 bits times 6."""
    first, second, third = (b["scales"][..., i : i + 4] for i in (0, 4, 8))
    scales = np.concatenate([first & 0x3F, third & 0x0F | first >> 2 & 0x30], -1)
    mins = np.concatenate([second & 0x3F, third >> 4 | second >> 2 & 0x30], -1)
    d, dmin = (b[name].astype(np.float32)[..., None] for name in ("d", "dmin"))
    return d * scales, -(dmin * mins)


def _quarters(qs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes [..., 64] -> [..., 2, 4, 32]: of each half, the lowest pair of bits of all its bytes, then the next."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    pairs: NDArray[np.uint8] = qs.reshape(*qs.shape[:-1], 2, 1, 32) >> shifts & np.uint8(3)
    return pairs


def _k2(b: NDArray[Any]) -> _Parts:
    d, dmin = (b[name].astype(np.float32)[..., None] for name in ("d", "dmin"))
    return _quarters(b["qs"]), d * (b["scales"] & 0x0F), -(dmin * (b["scales"] >> 4))


def _k3(b: NDArray[Any]) -> _Parts:
    """Sixteen six-bit scales less 32: the low four bits of each in 8 bytes, the others in 4."""
    low = _halves(b["scales"][..., :8]).reshape(*b.shape, 16)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (b["scales"][..., None, 8:] >> shifts & np.uint8(3)).reshape(*b.shape, 16)
    scales = (low | high << np.uint8(4)).astype(np.int8) - 32
    third: NDArray[np.uint8] = b["hmask"][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes = _quarters(b["qs"]).reshape(*b.shape, 8, 32) | third << np.uint8(2)
    return codes, b["d"].astype(np.float32)[..., None] * scales, None


def _nl(b: NDArray[Any]) -> _Parts:
    return _NL_CODES[_halves(b["qs"])], b["d"], None


def _xs(b: NDArray[Any]) -> _Parts:
    """Eight six-bit scales less 32: the low four bits of each in 4 bytes, the others in a word."""
    low = (b["scales_l"][..., None] >> np.array([0, 4], np.uint8) & np.uint8(0x0F)).reshape(*b.shape, 8)
    high = (b["scales_h"][..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)).astype(np.uint8)
    scales = (low | high << np.uint8(4)).astype(np.int8) - 32
    return _NL_CODES[_halves(b["qs"].reshape(*b.shape, 8, 16))], b["d"].astype(np.float32)[..., None] * scales, None


def _k4(b: NDArray[Any]) -> _Parts:
    return _halves(b["qs"].reshape(*b.shape, 4, 32)), *_scales_and_mins(b)


def _k5(b: NDArray[Any]) -> _Parts:
    codes = _halves(b["qs"].reshape(*b.shape, 4, 32)).reshape(*b.shape, 8, 32)
    fifth: NDArray[np.uint8] = b["qh"][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return codes | fifth << np.uint8(4), *_scales_and_mins(b)


def _k6(b: NDArray[Any]) -> _Parts:
    low = _halves(b["ql"].reshape(*b.shape, 2, 64)).reshape(*b.shape, 2, 4, 32)
    return low | _quarters(b["qh"]) << np.uint8(4), b["d"].astype(np.float32)[..., None] * b["scales"], None


def _type(form: GroupForm, read: Callable[[NDArray[Any]], _Parts], *fields: tuple[str, str, int]) -> GroupType:
    block = np.dtype([(name, code, (count,)) if count else (name, code) for name, code, count in fields])
    return GroupType(form, block, read)


_D, _M, _DMIN = ("d", "<f2", 0), ("m", "<f2", 0), ("dmin", "<f2", 0)
_SCALES = ("scales", "u1", 12)
_Q4 = GroupForm(bits=4, group=32, offset=0, wide=False, has_min=True)
_Q5 = replace(_Q4, bits=8)

_NL_CODES = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8)
"""What the codes of IQ4 stand for, and 128: steps that are finer towards zero."""

GROUP_TYPES: dict[str, GroupType] = {
    "q4_0": _type(replace(_Q4, offset=8, has_min=False), _plain4, _D, ("qs", "u1", 16)),
    "q4_1": _type(_Q4, _plain4, _D, _M, ("qs", "u1", 16)),
    "q5_0": _type(replace(_Q5, offset=16, has_min=False), _plain5, _D, ("qh", "u1", 4), ("qs", "u1", 16)),
    "q5_1": _type(_Q5, _plain5, _D, _M, ("qh", "u1", 4), ("qs", "u1", 16)),
    "q8_0": _type(GroupForm(8, 32, 128, False, False), _signed8, _D, ("qs", "u1", 32)),
    "iq4_nl": _type(GroupForm(8, 32, 128, False, False), _nl, _D, ("qs", "u1", 16)),
    "iq4_xs": _type(
        GroupForm(8, 32, 128, True, False), _xs, _D, ("scales_h", "<u2", 0), ("scales_l", "u1", 4), ("qs", "u1", 128)
    ),
    "q2_k": _type(GroupForm(4, 16, 0, True, True), _k2, ("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN),
    "q3_k": _type(GroupForm(4, 16, 4, True, False), _k3, ("hmask", "u1", 32), ("qs", "u1", 64), _SCALES, _D),
    "q4_k": _type(replace(_Q4, wide=True), _k4, _D, _DMIN, _SCALES, ("qs", "u1", 128)),
    "q5_k": _type(replace(_Q5, wide=True), _k5, _D, _DMIN, _SCALES, ("qh", "u1", 32), ("qs", "u1", 128)),
    "q6_k": _type(
        GroupForm(8, 16, 32, True, False), _k6, ("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D
    ),
}
"""By GGUF's name in lower case."""

"""The "int8" class of weights: 8-bit codes around zero with one scale for every 32, from whatever is stored."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferloop.engine.compute.groups import GROUP_TYPES, GroupCodes, GroupForm, common_form, promote, read_groups
from inferloop.engine.compute.stored import values_of

FORM = GroupForm(bits=8, group=32, offset=128, wide=False, has_min=False)


def to_int8(dtype: str, rows: NDArray[np.uint8]) -> GroupCodes:
    """Stored rows in FORM. What fits it as it is stays exact; anything else comes within half a step of a scale.

    A scale that does not fit fp16 becomes infinite, which the caller must refuse.
    """
    if dtype in GROUP_TYPES and common_form([GROUP_TYPES[dtype].form, FORM]) == FORM:
        return promote(read_groups(dtype, rows), FORM)
    return quantize(values_of(dtype, rows))


def quantize(values: NDArray[np.float32]) -> GroupCodes:
    """fp32 [rows][k]. Scales are rounded up to fp16, so that 127 steps always suffice, however small they are."""
    groups = values.reshape(len(values), -1, FORM.group)
    scales = _up_to_fp16(np.abs(groups).max(-1) / 127)
    with np.errstate(invalid="ignore"):
        steps = np.divide(groups, scales[..., None], out=np.zeros_like(groups), where=scales[..., None] > 0)
        codes = (np.rint(steps) + FORM.offset).astype(np.uint8)
    return GroupCodes(FORM, codes.reshape(values.shape), scales)


def _up_to_fp16(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        near = scales.astype(np.float16)
        return np.where(near < scales, np.nextafter(near, np.float16(np.inf)), near).astype(np.float32)

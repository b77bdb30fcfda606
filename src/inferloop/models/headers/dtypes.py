"""How numbers lie in model files: a name, how many share a block, and the block's bytes."""

from __future__ import annotations

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("fp32", 1, 4),
    1: ("fp16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 40),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("int8", 1, 1),
    25: ("int16", 1, 2),
    26: ("int32", 1, 4),
    27: ("int64", 1, 8),
    28: ("fp64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
}
"""GGML type id -> (name, elements per block, bytes per block). All that there are: other engines compute with what
ours do not read."""

SAFETENSORS_TYPES = {
    "F64": ("fp64", 8),
    "F32": ("fp32", 4),
    "F16": ("fp16", 2),
    "BF16": ("bf16", 2),
    "F8_E4M3": ("fp8", 1),
    "F8_E5M2": ("fp8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""The file's word -> (name, bytes)."""

_BLOCKS = {name: (1, width) for name, width in SAFETENSORS_TYPES.values()}
_BLOCKS |= {name: (block, num_bytes) for name, block, num_bytes in GGML_TYPES.values()}


def block_of(dtype: str) -> tuple[int, int]:
    """(elements, bytes) of the smallest piece of a row, for every dtype that a header names."""
    return _BLOCKS[dtype]

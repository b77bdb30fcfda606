"""Adapters with something wrong in their configuration, in their matrices, or between the two."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from lab.fuzz_files import directory_cases
from lab.fuzz_files.directory_cases import Files
from lab.fuzz_files.numbers import SIZES

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_STRENGTHS: tuple[Any, ...] = (
    0,
    -1,
    1e-300,
    1e30,
    3e38,
    1e308,
    10**400,
    float("nan"),
    float("inf"),
    "1",
    None,
    [],
    True,
)
_TARGETS: tuple[Any, ...] = (
    *([], [""], ["q_proj", "q_proj"], ["lm_head"], ["model"], ["q_proj"] * 100_000, ["q_proj", 1], [["q_proj"]]),
    *("", "all-linear", "(a+)+$" * 50, {"q_proj": 1}, None, 7),
)
_PATTERNS: tuple[Any, ...] = (
    *({"": 1}, {"^": 1}, {".": 4}, {"(a+)+$": 1}, {"proj": 8}, {"q_proj": 0}, {"q_proj": 1 << 40}, {"a" * 70_000: 1}),
    *({f"m{i}": 1 for i in range(5000)}, {"q_proj": float("nan")}, {"q_proj": {"q_proj": 1}}, ["q_proj"], "q_proj"),
)
_EXPECTED: dict[str, tuple[Any, ...]] = {"r": SIZES, "lora_alpha": _STRENGTHS, "target_modules": _TARGETS}
_EXPECTED |= {"rank_pattern": _PATTERNS, "alpha_pattern": _PATTERNS}
_OTHERS = ("use_dora", "modules_to_save", "bias", "init_lora_weights", "layers_to_transform", "fan_in_fan_out", "x")
_RENAMED = (("layers.0", "layers.99"), ("lora_A", "lora_B"), ("q_proj", "w_proj"))
_NUMBERS = (0.0, 1e38, 3e38, -3e38, 1e-45, float("nan"), float("inf"))


def case(rng: random.Random, samples: list[Files]) -> Files:
    files = dict(rng.choice(samples))
    for _ in range(rng.choice((1, 1, 2, 3))):
        fate = rng.random()
        if fate < 0.35 and _CONFIG in files:
            files[_CONFIG] = _configured(rng, files[_CONFIG])
        elif fate < 0.75 and _WEIGHTS in files:
            files[_WEIGHTS] = _rewritten(rng, files[_WEIGHTS])
        else:
            files = directory_cases.case(rng, [files])
    return files


def _configured(rng: random.Random, data: bytes) -> bytes:
    try:
        config: Any = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(config, dict):
        return data
    if rng.random() < 0.1:
        depth = rng.choice((50, 5000, 400_000))
        return b'{"peft_type": "LORA", "r": ' + b"[" * depth + b"]" * (depth if rng.random() < 0.5 else 0) + b"}"
    if rng.random() < 0.85:
        key = rng.choice(list(_EXPECTED))
        config[key] = rng.choice(_EXPECTED[key])
    else:
        config[rng.choice(_OTHERS)] = rng.choice((True, "all", ["lm_head"], [0], {"a": 1}, 1e308))
    return json.dumps(config).encode()


def _rewritten(rng: random.Random, data: bytes) -> bytes:
    """The same file with a tensor of another name, type, shape or number, and a header that fits it."""
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    try:
        header: Any = json.loads(data[8 : 8 + length])
        name = rng.choice([name for name in header if name != "__metadata__"])
        entry = header[name]
        begin, end = entry["data_offsets"]
        weights = bytearray(data[8 + length :])
        fate = rng.randrange(6)
        if fate == 0:
            words: tuple[str, ...] = (
                name.replace("layers.0", "layers.99"),
                name.removeprefix("base_model.model."),
                name + "x",
            )
            words += (name.replace("lora_A", "lora_B"), name.replace("q_proj", "w_proj"), "lm_head.lora_A.weight")
            header[rng.choice(words)] = header.pop(name)
        elif fate == 1:  # under two names, in one place
            header[name.removeprefix("base_model.model.")] = entry
        elif fate == 2:  # of as many bytes
            header[name] = entry | {"dtype": rng.choice(("F16", "BF16", "F32", "F64", "I8", "I64", "F8_E4M3", "BOOL"))}
        elif fate == 3:
            rows, columns = entry["shape"]
            shapes: list[list[int]] = [[columns, rows], [rows * columns], [1, rows * columns], [rows, columns, 1]]
            shapes += [[0, columns], []]
            header[name] = entry | {"shape": rng.choice(shapes)}
        elif fate == 4:
            for at in range(begin, end - 3, rng.choice((4, 64))):
                weights[at : at + 4] = struct.pack("<f", rng.choice(_NUMBERS))
        else:
            del weights[rng.choice((end - 1, begin, len(weights) // 2)) :]
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
        return directory_cases.damaged_weights(rng, data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(weights)

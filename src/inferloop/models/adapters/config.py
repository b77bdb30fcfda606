"""adapter_config.json: how strongly each pair of matrices counts. What would change the result otherwise is refused."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.models.headers.config_json import read_json_object
from inferloop.models.headers.fields import Fields

FILE = "adapter_config.json"
_MAX_BYTES = 1 << 20
_MAX_PATTERNS = 4096
_READ = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "peft_type", "init_lora_weights")
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("lora_dropout", "runtime_config", "megatron_core", "qalora_group_size"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the tensors tell
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # of a start that `init_lora_weights` names
)
_WHY = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole modules beside the pairs are not supported",
    "fan_in_fan_out": "transposed matrices are not supported",
    "trainable_token_indices": "embeddings of their own are not supported",
    "target_parameters": "experts are not adapted here",
    "layer_replication": "the model has the layers that it has",
}
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Other starts (pissa, olora, loftq, ...) change the base model's own weights when the adapter is loaded."""
_PATTERN = re.compile(r"\^?[A-Za-z0-9_.]{1,200}")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """`target_modules` as a list of names; None where it is an expression. `complete`: every layer that has such a
    module has it adapted."""

    rank: int
    alpha: float
    rank_stabilized: bool
    ranks: dict[str, int]
    alphas: dict[str, float]
    target_modules: tuple[str, ...] | None
    complete: bool

    def rank_of(self, module: str) -> int:
        """`module` is the full name, like model.layers.0.self_attn.q_proj."""
        key = _matching(self.ranks, module)
        return self.rank if key is None else self.ranks[key]

    def scaling_of(self, module: str) -> float:
        """By which B @ A is multiplied: alpha / rank, rank-stabilized (https://arxiv.org/abs/2312.03732) alpha / its
        root."""
        key, rank = _matching(self.alphas, module), self.rank_of(module)
        alpha = self.alpha if key is None else self.alphas[key]
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises ModelFileError naming the file and the key."""
    path = folder / FILE
    if not path.is_file():
        raise ModelFileError(f"{folder}: not a PEFT adapter directory, it has no {FILE}")
    fields = Fields(read_json_object(path, _MAX_BYTES), path)
    if fields.raw("peft_type") != "LORA":
        raise fields.fail("peft_type", f"is {str(fields.raw('peft_type'))[:80]!r}, only LORA is supported")
    if fields.raw("bias") not in (None, "none"):
        raise fields.fail("bias", f"is {str(fields.raw('bias'))[:80]!r}: adapted biases are not supported")
    start = fields.raw("init_lora_weights")
    if not any(start is plain or (start == plain and isinstance(start, str)) for plain in _PLAIN_STARTS):
        problem = f"is {str(start)[:80]!r}, which changes the base model too; convert the adapter to a plain one first"
        raise fields.fail("init_lora_weights", problem)
    for key in sorted(fields.keys() - {*_READ, *_WITHOUT_EFFECT}):
        if fields.raw(key):
            why = _WHY.get(key, "this key is not known here, and might change the result")
            raise fields.fail(key, f"is {repr(fields.raw(key))[:80]}: {why}")
    targets = _targets(fields)
    return AdapterConfig(
        rank=fields.count("r"),
        alpha=fields.real("lora_alpha"),
        rank_stabilized=fields.flag("use_rslora", False),
        ranks={key: of.count(key) for key, of in _pattern(fields, "rank_pattern")},
        alphas={key: of.real(key) for key, of in _pattern(fields, "alpha_pattern")},
        target_modules=targets,
        complete=(targets is not None or fields.raw("target_modules") == "all-linear")
        and not any(fields.raw(key) for key in ("exclude_modules", "layers_pattern"))
        and fields.raw("layers_to_transform") is None,
    )


def _targets(fields: Fields) -> tuple[str, ...] | None:
    value = fields.raw("target_modules")
    if not isinstance(value, list):
        return None
    if not all(isinstance(name, str) for name in value):
        raise fields.fail("target_modules", "is not a list of names")
    return tuple(dict.fromkeys(value))


def _pattern(fields: Fields, key: str) -> list[tuple[str, Fields]]:
    """Names, with what to read their values from. Expressions are refused: whoever wrote them is a stranger."""
    within = fields.within(key)
    names = list(fields.raw(key) or {})  # type: ignore[call-overload]
    if len(names) > _MAX_PATTERNS:
        raise fields.fail(key, f"has {len(names)} entries, more than {_MAX_PATTERNS}")
    for name in names:
        if not _PATTERN.fullmatch(name):
            raise fields.fail(key, f"has {name[:80]!r}, which is no plain name of a module")
    return [(name, within) for name in names]


def _matching(pattern: dict[str, int] | dict[str, float], module: str) -> str | None:
    """The first of these that names the module: its last parts, or with ^ in front all of it."""
    for key in pattern:
        if module == key.removeprefix("^") or (not key.startswith("^") and module.endswith("." + key)):
            return key
    return None

"""One file for each architecture: what config.json and GGUF keys of it mean."""

from __future__ import annotations

from inferloop.models.headers.families import (
    gemma2,
    gemma3,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from inferloop.models.headers.families.family import Family

__all__ = ["FAMILIES", "Family", "family_of_config", "family_of_gguf"]

_MODULES = (llama, mistral, qwen2, qwen3, gemma2, gemma3, mixtral, qwen3_moe)
FAMILIES = {module.FAMILY.name: module.FAMILY for module in _MODULES}
"""By transformers' model_type."""


def family_of_config(model_type: str | None) -> Family | None:
    """None: no architecture that runs here."""
    return next((f for f in FAMILIES.values() if model_type in (f.name, *f.model_types)), None)


def family_of_gguf(architecture: str | None, *, has_experts: bool) -> Family | None:
    """GGUF calls Mixtral llama, and tells the two apart by their experts."""
    found = (f for f in FAMILIES.values() if f.gguf_architecture == architecture and f.has_experts == has_experts)
    return next(found, None)

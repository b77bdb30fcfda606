"""How a model and its precision are written, as a value."""

from __future__ import annotations

from inferloop.contract.located import Located
from inferloop.contract.reader import Problems, Section, as_text
from inferloop.contract.workload import PRECISIONS, ModelRef, Precision

_FLOAT_WORDS = ("fp32", "bf16", "fp16")


def read_model(node: Located | None, problems: Problems) -> ModelRef | None:
    if node is None:
        return None
    if not isinstance(node.value, dict):
        text = as_text(node, problems)
        return None if text is None else split_model(text)
    section = Section(node, problems, ("id", "precision"))
    model_id = section.text("id", required=True)
    precision = read_precision(section.get("precision"), problems)
    return None if model_id is None else ModelRef(model_id, precision)


def split_model(text: str) -> ModelRef:
    """`name-bf16` -> name in bf16. Without a known precision at its end, or for a path, the text is the name."""
    name, dash, word = text.rpartition("-")
    if dash and name and word in PRECISIONS and not text.startswith((".", "/", "~")):
        return ModelRef(name, precision_from_word(word))
    return ModelRef(text)


def precision_from_word(word: str) -> Precision:
    """One word for all: a float format is meant for weights, activations and KV alike; a quantized one for the
    weights, leaving the rest as stored."""
    return Precision(word, word, word) if word in _FLOAT_WORDS else Precision(weights=word)


def read_precision(node: Located | None, problems: Problems) -> Precision:
    if node is None:
        return Precision()
    if not isinstance(node.value, dict):
        word = as_text(node, problems, PRECISIONS)
        return precision_from_word(word) if word else Precision()
    section = Section(node, problems, ("weights", "activations", "kv"))
    weights, activations, kv = (section.text(k, choices=PRECISIONS) for k in ("weights", "activations", "kv"))
    return Precision(weights, activations, kv)

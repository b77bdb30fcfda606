"""What the servers of llama.cpp have in common: what they refuse, and what the rest comes to in ggml's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferloop.backends.engine_kind import ReplicaOptions, context_of, one_device, refuse
from inferloop.core.cores import usable_cores


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """`kv` as contracts name it, `kv_bytes` of it for each token; `context` is the longest of one request."""

    kv: str
    kv_bytes: float
    context: int
    threads: int


def llama_cpp(name: str, options: ReplicaOptions, kv_types: Mapping[str, Any]) -> LlamaCpp:
    """Weights are as the file stores them; KV is bf16 unless asked otherwise, which beside flash attention is the
    fastest of its forms on CPUs with AVX-512. Raises UsageError, in the name of the engine, for what cannot be."""
    one_device(name, options)
    header = options.files.header
    if options.weights not in (None, header.stored_precision):
        instead = f"weights stay as the file stores them, in {header.stored_precision}"
        raise refuse(name, "model.precision", options.weights, instead)
    if options.activations is not None:
        raise refuse(name, "activations in", options.activations, "it chooses them by the type of the weights")
    kv = options.kv or "bf16"
    if kv not in kv_types:
        raise refuse(name, "KV in", kv, f"there are {', '.join(kv_types)}")
    kv_bytes = header.shape.kv_bytes_per_token(kv)
    return LlamaCpp(kv, kv_bytes, context_of(options, kv_bytes), options.threads or usable_cores())

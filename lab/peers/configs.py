"""What is compared: every engine in the configurations that could be its best, class by class.

A class is what the weights are kept in. Peers run with the flags that were found to help on small CPUs, next to their
defaults; which of them is an engine's best is measured anew every time, point by point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.peers.models import ModelSet
from lab.peers.point import Point
from lab.peers.table import OURS

CLASSES = ("4-bit", "int8", "bf16")
MODES_OF = {"4-bit": "stored", "int8": "int8", "bf16": "bf16"}
"""What this engine calls the weights of a class."""


FEW = {"llama-cpp": ("flash, KV bf16", "flash, KV f16"), "openvino": ("latency, 2048 a step",)}
"""Those that come first at most points. A process of OpenVINO holds three times the weights of a bf16 model."""


@dataclass(frozen=True, slots=True)
class Config:
    """`engine` is also the folder of its environment; ours is that of this project."""

    engine: str
    worker: str
    weights: str
    name: str
    """What tells it from the others of its engine and class."""
    spec: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    numbers_of: str | None = None
    """The configuration of this engine and class that computes the same numbers; None: itself."""

    @property
    def key(self) -> str:
        return f"{self.weights} | {self.engine} | {self.name}"

    def python(self) -> Path:
        return Path(".venv/bin/python") if self.engine == OURS else Path(".peers") / self.engine / "bin/python"


def points(streams: list[int], prefill: list[int]) -> list[Point]:
    return [Point(num, 256, 128) for num in streams] + [Point(1, num, 1) for num in prefill]


def scout_of(point: Point) -> Point:
    """A short form of a point, by which the best configurations of an engine are picked."""
    if point.output == 1:
        return Point(1, min(point.prompt, 512), 1)
    return Point(min(point.streams, 8), 256, 32)


def configs(
    classes: list[str], models: ModelSet, vocab_size: int, wanted: list[Point], threads: int, *, few: bool = False
) -> list[Config]:
    """All that there are for these classes. Every engine gets room for the longest prompt and the most streams.
    `few`: of a large model FEW of a peer, as all of them are in memory together."""
    longest = max(point.prompt + point.output for point in wanted)
    most = max(point.streams for point in wanted)
    length = max(point.prompt + point.output for point in wanted if point.streams == most)
    found: list[Config] = []
    for weights in classes:
        found += _ours(weights, models, threads, longest + most * (length + 16), most)
        found += _llama_cpp(weights, models, threads, [[1, longest + 16], [most, length]])
        found += _openvino(weights, models, threads, vocab_size, most)
        if weights == "bf16":
            found += _vllm(models, threads, max(longest, length), most)
            found.append(
                Config("transformers", "transformers", weights, "bf16", _spec(models.hf, threads, dtype="bfloat16"))
            )
    if not few:
        return found
    return [c for c in found if c.name in FEW.get(c.engine, (c.name,))]


def _spec(model: Path, threads: int, **more: Any) -> dict[str, Any]:
    return {"model": str(model.absolute()), "threads": threads, **more}


def _ours(weights: str, models: ModelSet, threads: int, num_tokens: int, most: int) -> list[Config]:
    spec = _spec(models.stored, threads, num_tokens=num_tokens, step_tokens=512, max_sequences=most)
    modes = [f"native-{MODES_OF[weights]}/{kv}" for kv in ("bf16", "int8")]
    return [Config(OURS, "inferloop", weights, mode, {**spec, "mode": mode}) for mode in modes]


def _llama_cpp(weights: str, models: ModelSet, threads: int, contexts: list[list[int]]) -> list[Config]:
    model = {"4-bit": models.stored, "int8": models.q8_0, "bf16": models.bf16}[weights]
    spec = _spec(model, threads, contexts=contexts, ubatch=512, unified=False)
    variants: list[tuple[str, dict[str, Any], str | None]] = [
        ("flash, KV bf16", {"flash": True, "kv": "bf16"}, None),
        ("flash, KV f16", {"flash": True, "kv": "f16"}, None),
        ("no flash, KV f16", {"flash": False, "kv": "f16"}, None),
        ("flash, KV q8_0", {"flash": True, "kv": "q8_0"}, None),
        ("flash, KV bf16 unified", {"flash": True, "kv": "bf16", "unified": True}, "flash, KV bf16"),
    ]
    return [
        Config("llama-cpp", "llama_cpp", weights, name, {**spec, **more}, numbers_of=same)
        for name, more, same in variants
    ]


def _openvino(weights: str, models: ModelSet, threads: int, vocab_size: int, most: int) -> list[Config]:
    model = {"4-bit": models.stored, "int8": models.q8_0, "bf16": models.f16}[weights]

    def config(name: str, step_tokens: int, numbers_of: str | None = None, **properties: str) -> Config:
        scheduler = {"cache_size": 1, "max_num_batched_tokens": step_tokens, "max_num_seqs": most}
        scheduler |= {"enable_prefix_caching": False, "dynamic_split_fuse": True}
        spec = _spec(model, threads, scheduler=scheduler, properties=properties, vocab_size=vocab_size)
        return Config("openvino", "openvino", weights, name, spec, numbers_of=numbers_of)

    first = "latency, 256 a step"
    return [
        config(first, 256, PERFORMANCE_HINT="LATENCY"),
        config("latency, 2048 a step", 2048, first, PERFORMANCE_HINT="LATENCY"),
        config("throughput, 256 a step", 256, first, PERFORMANCE_HINT="THROUGHPUT"),
        config("latency, KV bf16", 256, PERFORMANCE_HINT="LATENCY", KV_CACHE_PRECISION="bf16"),
    ]


def _vllm(models: ModelSet, threads: int, longest: int, most: int) -> list[Config]:
    """Compiled alone: eager was slower at every point that both were measured at, by 2 to 60 %, and starts in 15 s."""
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_AOT_COMPILE": "0",  # that cache fails to load in 0.32, and compiles anew at every start
        "HF_HUB_OFFLINE": "1",
    }
    spec = _spec(models.hf, threads, max_model_len=longest + 16, max_num_seqs=most, max_num_batched_tokens=2048)
    return [Config("vllm", "vllm", "bf16", "compiled", {**spec, "eager": False}, env)]

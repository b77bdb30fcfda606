"""llama.cpp behind the server of llama-cpp-python 0.3.x (`python -m llama_cpp.server`).

That server answers one request at a time: others wait for a lock, so what it completes does not grow with the load.
Flags were read from llama_cpp/server/settings.py of 0.3.36.
"""

from __future__ import annotations

from collections.abc import Mapping

from inferloop.backends.engine_kind import (
    PARSE_AND_END,
    Argv,
    EngineKind,
    Flag,
    Installation,
    ReplicaOptions,
    refuse,
)
from inferloop.backends.llama_cpp import llama_cpp
from inferloop.backends.protocols import YES, Capability, LaunchSpec, ReadyProbe

NAME = "llamacpp"
_KV_TYPES = {"fp32": 0, "fp16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8, "bf16": 30}
"""What ggml numbers them."""
_NEVER = -100.0
"""A bias under which a token is not chosen."""

_ONE_AT_A_TIME = "requests wait for a lock and are answered one after the other"
CAPABILITIES = {
    "chat": YES,
    "completions": YES,
    "stream": YES,
    "stop": YES,
    "seed": YES,
    "logprobs": Capability("no", "it would keep the logits of the whole context in memory (logits_all)"),
    "prompt_logprobs": Capability("no", "it would keep the logits of the whole context in memory (logits_all)"),
    "embeddings": Capability("no", "needs a process of its own (embedding)"),
    "tokenize": Capability("no", "has /extras/tokenize, of another form"),
    "cached_tokens": Capability("no", "keeps the last prompt, and does not say how much of it was used"),
    "batching": Capability("no", _ONE_AT_A_TIME),
    "ignore_eos": Capability("no", "end tokens are given a bias instead"),
    "stream_usage": Capability("no", "streams end without a count; one frame is taken for one token"),
    "n": Capability("no", "read and ignored"),
    "validation": Capability("no", "wrong and unknown fields are ignored, or answered with 500"),
    "request_id": Capability("no", "refused with 400 unless it is a UUID, and not sent back"),
    "text_parts": Capability("no", "content in parts is answered with 500"),
    "metrics": Capability("no", "there is no /metrics"),
    "drain": Capability("partial", "on SIGTERM it ends what runs, and does not say so before"),
    "tools": Capability("partial", "only through chat formats named by hand"),
    "json_schema": Capability("partial", "for chats; by a grammar made of the schema"),
    "images": Capability("no", "only with a second file and a chat format for it"),
    "tensor_parallel": Capability("no", "one process on one device"),
}


def launch(here: Installation, options: ReplicaOptions) -> LaunchSpec:
    """A server on the CPU for one GGUF file, with flash attention."""
    common = llama_cpp(NAME, options, _KV_TYPES)
    if options.max_num_seqs not in (None, 1):
        raise refuse(NAME, "max_num_seqs", options.max_num_seqs, _ONE_AT_A_TIME)
    argv = (
        Argv(str(here.python), "-m", "llama_cpp.server", joiner="_")
        .set("model", options.files.path)
        .set("model_alias", options.model_id)
        .set("host", "127.0.0.1")
        .set("port", "{port}")
        .set("n_ctx", common.context)
        .set("n_threads", common.threads)
        .set("n_threads_batch", common.threads)
        .set("seed", options.seed)
        .set("flash_attn", "true")
        .set("type_k", _KV_TYPES[common.kv])
        .set("type_v", _KV_TYPES[common.kv])
        .set("logits_all", "false")
        .set("use_mlock", "false")
        .set("interrupt_requests", "false")  # else a request ends the stream of the one before
        .set("verbose", "false")
        .update(options.flags)
    )
    return LaunchSpec(
        backend=NAME,
        argv=argv.words(),
        model_id=options.model_id,
        env={"HOST": "127.0.0.1", "PORT": "{port}"},  # which would go before the flags, if they were set outside
        ready=ReadyProbe("/v1/models", 300.0),
        capabilities=CAPABILITIES,
        drain_timeout_s=10.0,
        version=f"llama-cpp-python {here.version}",
        metrics_path=None,
        context_length=common.context,
        exact_length={"logit_bias": {str(token): _NEVER for token in options.files.header.eos_token_ids}},
        settings={
            "threads": argv.get("n_threads", "half of the cores"),
            "KV": common.kv,
            "KV memory": f"{argv.get('n_ctx', '2048')} tokens",
            "requests together": f"1: {_ONE_AT_A_TIME}",
            "tokens a step": argv.get("n_batch", "512 (its default)"),
            "flash attention": argv.get("flash_attn", "false"),
            "prefix cache": "the last prompt",
        },
    )


def _read_flags(here: Installation, flags: Mapping[str, Flag]) -> Argv:
    return Argv(str(here.python), "-c", PARSE_AND_END, "llama_cpp.server", joiner="_").update(flags)


KIND = EngineKind(
    name=NAME,
    about="llama.cpp through llama-cpp-python's server; CPU; one request at a time",
    distributions=("llama-cpp-python",),
    server_needs=("fastapi", "uvicorn", "sse-starlette", "starlette-context", "pydantic-settings"),
    install="pip install 'llama-cpp-python[server]' (compiles; or: make peers)",
    reads=("gguf",),
    verified="0.3.36",
    tuned="on 2 cores: one thread completes 26 % less of a burst; without flash attention, or with KV in fp16, it "
    "completes the same within chance",
    capabilities=CAPABILITIES,
    launch=launch,
    read_flags=_read_flags,
    homepage="https://github.com/abetlen/llama-cpp-python",
)

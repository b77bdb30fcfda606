"""TensorRT-LLM (`trtllm-serve`, its PyTorch backend), on NVIDIA GPUs. Never run by this project: its flags were read
from tensorrt_llm/commands/serve.py at commit 00209af149e7."""

from __future__ import annotations

from inferloop.backends.engine_kind import (
    Argv,
    EngineKind,
    Installation,
    ReplicaOptions,
    check_share,
    precision_in_directory,
    refuse,
)
from inferloop.backends.protocols import YES, Capability, LaunchSpec, ReadyProbe

NAME = "trtllm"

CAPABILITIES = {
    "chat": YES,
    "completions": YES,
    "stream": YES,
    "stop": YES,
    "seed": YES,
    "logprobs": Capability("partial", "as its options for gathering logits allow"),
    "prompt_logprobs": Capability("no", "not through its server"),
    "embeddings": Capability("no", "another command (embeddings)"),
    "tokenize": Capability("no", "not offered"),
    "cached_tokens": Capability("partial", "in usage, of reused blocks"),
    "batching": YES,
    "ignore_eos": YES,
    "stream_usage": YES,
    "metrics": Capability("partial", "/metrics is JSON, and empties what it tells"),
    "drain": Capability("no", "SIGTERM ends what runs"),
    "tools": Capability("partial", "only with the parser named (--tool_parser)"),
    "json_schema": Capability("partial", "only with guided decoding set in its configuration file"),
    "images": Capability("partial", "for models that see"),
    "tensor_parallel": YES,
    "gguf": Capability("no", "a GGUF file is converted to a directory in bf16 first"),
}


def launch(here: Installation, options: ReplicaOptions) -> LaunchSpec:
    """A server for one model directory. It takes precision from the checkpoint, and no seed or KV format as flags."""
    check_share(NAME, options)
    if options.weights not in (None, precision_in_directory(options)):
        instead = "weights stay as the checkpoint stores them; quantize it with NVIDIA's own tool"
        raise refuse(NAME, "model.precision", options.weights, instead)
    if options.activations not in (None, options.weights):
        raise refuse(NAME, "activations in", options.activations, "they are kept as the weights are")
    if options.kv not in (None, "bf16"):
        raise refuse(NAME, "KV in", options.kv, "other formats need a configuration file (flag config=FILE)")
    if not options.prefix_cache:
        raise refuse(NAME, "prefix_cache", False, "turning it off needs a configuration file (flag config=FILE)")
    if options.seed is not None:
        raise refuse(NAME, "seed", options.seed, "it takes seeds with requests alone")
    if options.memory_mib is not None:
        raise refuse(
            NAME, "memory_mib", options.memory_mib, "memory is given as a share of the device, as memory_share"
        )
    argv = (
        Argv(str(here.python), "-m", "tensorrt_llm.commands.serve", "serve", str(options.files.path), joiner="_")
        .set("backend", "pytorch")
        .set("host", "127.0.0.1")
        .set("port", "{port}")
        .set("max_seq_len", options.context_length)
        .set("max_batch_size", options.max_num_seqs)
        .set("tp_size", options.tensor_parallel if options.tensor_parallel > 1 else None)
        .set("free_gpu_memory_fraction", options.memory_share)
        .update(options.flags)
    )
    return LaunchSpec(
        backend=NAME,
        argv=argv.words(),
        model_id=options.files.path.name,  # it serves under the last part of its path
        env={"HF_HUB_OFFLINE": "1"},
        ready=ReadyProbe("/health", 900.0),
        capabilities=CAPABILITIES,
        version=f"tensorrt-llm {here.version}",
        context_length=options.context_length or options.files.header.shape.context_length,
    )


KIND = EngineKind(
    name=NAME,
    about="TensorRT-LLM; NVIDIA GPUs",
    distributions=("tensorrt-llm",),
    install="pip install tensorrt-llm --extra-index-url https://pypi.nvidia.com",
    reads=("hf",),
    verified="never run (flags of commit 00209af149e7)",
    tuned="never: nobody has run it here",
    capabilities=CAPABILITIES,
    launch=launch,
    homepage="https://nvidia.github.io/TensorRT-LLM",
)
